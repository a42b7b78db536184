"""Find the caller of a request: the application's loader, or an extension that has signed the caller in.

A principal is a stable id of a subject, never a cookie or a token: those rotate, and a retry with the new one would run a
payment again. We refuse a request that has credentials and no principal: under a shared name, one caller would get the
response of another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CoroutineType
from typing import Any, Final

from flask import Flask, Request, g, request

from flask_idempotency.engine.errors import ConfigurationError, IdempotencyError
from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.settings.reading import EXTENSIONS

Loader = Callable[[], "str | None"]

ASSERTED: Final = (
    "Remote-User",
    "X-Remote-User",
    "X-WebAuth-User",
    "X-User-Id",
    "X-Consumer-Id",
    "X-Consumer-Custom-Id",
    "X-Consumer-Username",
    "X-Credential-Identifier",
    "X-Authenticated-Userid",
    "X-Forwarded-User",
    "X-Forwarded-Email",
    "X-Forwarded-Preferred-Username",
    "X-Forwarded-Access-Token",
    "X-Auth-Request-User",
    "X-Auth-Request-Email",
    "X-Auth-Request-Access-Token",
    "X-Amzn-Oidc-Identity",
    "X-Amzn-Oidc-Data",
    "X-Amzn-Oidc-Accesstoken",
    "X-Goog-IAP-JWT-Assertion",
    "X-Goog-Authenticated-User-Id",
    "X-Goog-Authenticated-User-Email",
    "X-MS-Client-Principal",
    "X-MS-Client-Principal-Id",
    "Cf-Access-Jwt-Assertion",
    "Tailscale-User-Login",
)
"""Request headers in which a proxy names the caller that it has signed in."""

CERTIFICATES: Final = (
    "X-Forwarded-Client-Cert",
    "X-Forwarded-Tls-Client-Cert",
    "X-Forwarded-Tls-Client-Cert-Info",
    "X-Client-Cert",
    "Client-Cert",
    "X-ARR-ClientCert",
    "X-Amzn-Mtls-Clientcert",
    "X-Amzn-Mtls-Clientcert-Leaf",
)
"""Request headers in which a proxy passes on a client's certificate."""

_OF_CERTIFICATES: Final = (
    "SSL_CLIENT_",
    "HTTP_SSL_CLIENT_",
    "HTTP_X_SSL_CLIENT_",
    "HTTP_X_CLIENT_VERIFY",
    "HTTP_X_CLIENT_DN",
)
PREFIXES: Final = (*_OF_CERTIFICATES, "OIDC_CLAIM_", "HTTP_OIDC_CLAIM_")
"""Prefixes of names in the environ: a client's certificate as a server or proxy describes it, and mod_auth_openidc's caller."""

NO_CERTIFICATE: Final = ("NONE", "(null)")
"""The values of such a variable if the client has no certificate: Apache's and nginx's."""

CREDENTIALS: Final[Mapping[str, tuple[str, ...]]] = {
    "authorization": ("Authorization", "Proxy-Authorization", "X-Authorization"),
    "api-key": (
        "X-API-Key",
        "Api-Key",
        "ApiKey",
        "X-API-Token",
        "X-API-Secret",
        "X-Goog-Api-Key",
        "Ocp-Apim-Subscription-Key",
        "X-Functions-Key",
    ),
    "certificate": CERTIFICATES,
    "remote-user": ASSERTED,
    "other": (
        "X-Token",
        "X-User-Token",
        "X-Auth-Token",
        "X-Auth-Key",
        "X-Access-Token",
        "X-Session-Token",
        "X-Amz-Security-Token",
        "Private-Token",
        "DPoP",
    ),
    "cookie": ("Cookie",),
}
"""Request headers by the kind of credential: see `activity.CALLERS`. The kind that tells the most is first."""

TOKENS: Final[list[str]] = [
    name for kind in ("authorization", "api-key", "other", "cookie") for name in CREDENTIALS[kind]
]
"""Request headers in which a client proves who it is."""

_RESERVED: Final = ("httpauth:", "jwt:", "login:", "identity:", "webhook:")
"""Prefixes of the ids of extensions and webhooks. An id of Flask-Login with such a prefix gets another one."""

_JWT_NAMES: Final = "_jwt_extended"

REMEDY: Final = (
    "Register @idempotency.principal_loader: a function that returns a stable id of the signed-in subject (never a cookie or "
    "a token). If the view's own decorators sign the caller in (@auth.login_required of Flask-HTTPAuth does), put @claim_here "
    "below them. Set IDEMPOTENCY_ALLOW_ANONYMOUS to True only if all such callers may share one key space."
)

PASTE: Final = """\
@idempotency.principal_loader
def principal():
    user = g.get("user")  # as your own authentication leaves it
    return None if user is None else str(user.id)"""
"""The problem shows this in debug mode if the application has no way to name a caller."""

_LOADER: Final = "the principal_loader"

_DECORATORS: Final = {
    "Flask-HTTPAuth": "@auth.login_required",
    "Flask-JWT-Extended": "@jwt_required()",
    "Flask-Login": "@login_required",
    "Flask-Principal": "@permission.require(401)",
}
"""By extension, the decorator that responds to a client that has not signed in."""


class UnknownCaller(IdempotencyError):
    """A request has credentials, and the application does not name its caller. The text names the header, without its value."""

    def __init__(self, credential: str, *, set_up: tuple[str, ...], in_view: bool) -> None:
        named = f"{' and '.join(set_up)} {'names' if len(set_up) == 1 else 'name'} no caller" if set_up else ""
        super().__init__(
            f"the request carries credentials ({credential}), and {named or 'the application does not name the caller'}"
        )
        self.set_up = set_up
        """The loader or the extensions of the application that name callers. If it has any, signing in helps."""
        self._in_view = in_view

    @property
    def remedy(self) -> str:
        """Return what the author of the application can do, the likely remedy first."""
        if not self.set_up:
            return REMEDY
        public = (
            "For a public view, return an id for each user and each visitor from @idempotency.principal_loader, or set "
            "IDEMPOTENCY_ALLOW_ANONYMOUS to True if all callers without a name may share one key space."
        )
        if self._in_view:
            return f"The decorators above @claim_here let this client pass. {public}"
        known = [_DECORATORS[name] for name in self.set_up if name in _DECORATORS]
        return (
            f"Put @claim_here below {' or '.join(known) or 'the decorator that signs callers in'}, directly above the view: a "
            "client that is not signed in then gets the response of that decorator, such as your redirect to the login page. "
            f"{public}"
        )

    @property
    def lines(self) -> str:
        """Return the lines to paste that the problem shows in debug mode."""
        if not self.set_up:
            return PASTE
        decorators = [_DECORATORS[name] for name in self.set_up if name in _DECORATORS]
        if self._in_view or not decorators:
            return ""
        return "\n".join(
            ('@app.post("/payments")  # your route', decorators[0], "@claim_here", "def view(): ...  # your view")
        )


class AnonymousCaller(IdempotencyError):
    """A request has no caller, and IDEMPOTENCY_ALLOW_ANONYMOUS is False."""


class Credentials:
    """The credentials that one application knows. It reads no session, because that would add `Vary: Cookie`."""

    def __init__(self, added: tuple[str, ...] = (), *, allow_anonymous: bool | None = None) -> None:
        self._allow_anonymous = allow_anonymous
        self._known = {environ_name(name): (name, "other") for name in added}
        self._known |= {environ_name(name): (name, kind) for kind, names in CREDENTIALS.items() for name in names}
        self._known["REMOTE_USER"] = ("REMOTE_USER", "remote-user")
        """By its name in the environ what a credential is called, and its kind."""

    def kind_of(self, request: Request) -> str:
        """Return which kind of credential this request carries: one of `activity.CALLERS`.

        Of several, the first in the order of `CREDENTIALS` counts: a browser sends its cookies with every request.
        """
        environ = request.environ
        found = {self._known[name][1] for name in self._known.keys() & environ.keys() if str(environ[name]).strip()}
        found = found or {
            "certificate" if name.startswith(_OF_CERTIFICATES) else "remote-user"
            for name, value in environ.items()
            if name.startswith(PREFIXES) and str(value).strip() and value not in NO_CERTIFICATE
        }
        return next((kind for kind in CREDENTIALS if kind in found), "anonymous")

    def knows(self, name: str) -> bool:
        """Return whether this name in the environ is that of a credential."""
        return name in self._known or name.startswith(PREFIXES)

    def of(self, request: Request) -> str | None:
        """Return the name of a credential of this request, or None. An empty value is none."""
        environ = request.environ
        for name in self._known.keys() & environ.keys():
            if str(environ[name]).strip():
                return self._known[name][0]
        for name, value in environ.items():
            if name.startswith(PREFIXES) and str(value).strip() and value not in NO_CERTIFICATE:
                return name.removeprefix("HTTP_")
        return None

    def principal(self, loader: Loader | None, request: Request, app: Flask, *, in_view: bool = False) -> str | None:
        """Return the stable id of this request's caller, or None for a caller without a name.

        If there is a loader, it decides alone. Otherwise the first of these that names the caller decides: Flask-HTTPAuth,
        Flask-JWT-Extended, Flask-Login, Flask-Principal. A prefix keeps their ids apart, except those of Flask-Login.

        `in_view`: the decorators of the view have run. Before, `g` may hold data of a request around this one.

        Raises `UnknownCaller` for a request with credentials and without a name, unless anonymous callers are allowed. Raises
        the errors of Flask-JWT-Extended for a token that is not valid: for an expired or revoked one in any case, for others
        if no other extension names the caller.
        """
        set_up: tuple[str, ...]
        if loader is not None:
            named: Any = loader()
            if isinstance(named, CoroutineType):
                # Most loaders are no coroutine functions, and Flask's `ensure_sync` takes as long to find that out as they run.
                named = app.ensure_sync(partial(_awaited, named))()
            name, set_up = checked(named, "principal_loader"), (_LOADER,)
        else:
            name, set_up, refused = _from_extensions(app, request, EXTENSIONS, in_view=in_view)
            if refused is not None:
                # The application's own error handlers respond to a bad token. The request must not become anonymous.
                raise refused
            bounded(name, "authentication extension gives this caller")
        if name is None and not self._allow_anonymous and (found := self.of(request)) is not None:
            raise UnknownCaller(found, set_up=set_up, in_view=in_view)
        return name


async def _awaited(name: CoroutineType[Any, Any, Any]) -> Any:
    return await name


def principal_by(extensions: tuple[str, ...], request: Request, app: Flask, *, in_view: bool) -> str | None:
    """Return the name that these extensions gave this caller while there was no loader.

    A token that has expired or was revoked is refused here too, so that the retry with a new one finds its key. Any other
    token that is not valid named no caller.
    """
    name, _, _ = _from_extensions(app, request, extensions, in_view=in_view)
    return bounded(name, "former authentication extension gives this caller")


def extensions_of(app: Flask) -> tuple[str, ...]:
    """Return the extensions that are set up on this application and name callers, in the order of `EXTENSIONS`.

    Flask-HTTPAuth is never among them, because it leaves no trace on an application. See `may_have_httpauth`.
    """
    principals = sys.modules.get("flask_principal")
    owners = [getattr(hook, "__self__", None) for hook in app.before_request_funcs.get(None, ())]
    has_principal = principals is not None and any(isinstance(each, principals.Principal) for each in owners)
    there = (False, _has_jwt(app), _has_login(app), has_principal)
    return tuple(name for name, is_there in zip(EXTENSIONS, there, strict=True) if is_there)


def may_have_httpauth() -> bool:
    """Return whether some module has imported Flask-HTTPAuth."""
    return "flask_httpauth" in sys.modules


def is_of_httpauth(principal: str | None) -> bool:
    """Return whether Flask-HTTPAuth named this principal. Call it only if there is no loader."""
    return principal is not None and principal.startswith(_RESERVED[0])


def identifies(app: Flask) -> bool:
    """Return whether an extension that names callers is already set up on this application."""
    return _has_login(app) or _has_jwt(app)


def checked(value: Any, loader: str) -> str | None:
    """Return a name that a loader returned, or None. Raise `ConfigurationError` for anything else."""
    if value is None or (isinstance(value, str) and 0 < len(value) <= LONGEST_NAME):
        return value
    if isinstance(value, str) and value:
        return bounded(value, f"{loader} returned")
    problem = "an empty string" if value == "" else f"a {type(value).__name__}"
    raise ConfigurationError(f"The {loader} returned {problem}. It must return a non-empty str, or None for no caller.")


def bounded(name: str | None, source: str) -> str | None:
    """Return this name. Raise `ConfigurationError` if it is longer than a store keeps."""
    if name is not None and len(name) > LONGEST_NAME:
        raise ConfigurationError(
            f"The {source} a name of {len(name)} characters, and at most {LONGEST_NAME} are stored with a record. Return a "
            "shorter stable id, or a digest of this one."
        )
    return name


def environ_name(header: str) -> str:
    """Return the name of this header field in the environ."""
    return "HTTP_" + header.upper().replace("-", "_")


def _from_extensions(
    app: Flask, request: Request, extensions: tuple[str, ...], *, in_view: bool
) -> tuple[str | None, tuple[str, ...], Exception | None]:
    """Return the caller's name, the extensions that are set up, and the error of a refused token if there is no name."""
    set_up: tuple[str, ...] = ()
    refused = None
    if "Flask-HTTPAuth" in extensions and "flask_httpauth_user" in g:
        # A decorator or a hook has checked this request. If login is optional, it leaves None or False.
        set_up = ("Flask-HTTPAuth",)
        if g.flask_httpauth_user is not None and g.flask_httpauth_user is not False:
            return f"httpauth:{_not_a_token(_subject(g.flask_httpauth_user, 'Flask-HTTPAuth'), request)}", set_up, None
    if "Flask-JWT-Extended" in extensions and _has_jwt(app):
        set_up += ("Flask-JWT-Extended",)
        name, refused = _jwt_subject(app, in_view=in_view)
        if name is not None:
            return f"jwt:{name}", set_up, None
    if "Flask-Login" in extensions and _has_login(app):
        set_up += ("Flask-Login",)
        # An optional package: an application with a login_manager has it.
        from flask_login import current_user  # type: ignore[import-untyped]

        # An application's own anonymous_user may have an id, which all callers who have not signed in share.
        name = current_user.get_id() if current_user.is_authenticated else None
        if (name := checked(name, "get_id() of Flask-Login's current_user")) is not None:
            return f"login:{name}" if name.startswith(_RESERVED) else name, set_up, None
    if "Flask-Principal" in extensions and (principals := sys.modules.get("flask_principal")) is not None:
        identity = g.get("identity")
        if isinstance(identity, principals.Identity):
            set_up += ("Flask-Principal",)
            if identity.id is not None:
                return f"identity:{_subject(identity.id, 'Flask-Principal')}", set_up, None
    return None, set_up, refused


def _has_login(app: Flask) -> bool:
    return hasattr(app, "login_manager")


def _has_jwt(app: Flask) -> bool:
    return "flask-jwt-extended" in app.extensions


def _jwt_subject(app: Flask, *, in_view: bool) -> tuple[str | None, Exception | None]:
    """Return the subject of a valid token, or the error of a refused one, or neither if there is no token."""
    from flask_jwt_extended import get_jwt, verify_jwt_in_request
    from flask_jwt_extended.exceptions import JWTExtendedException, RevokedTokenError
    from jwt.exceptions import ExpiredSignatureError, PyJWTError

    claim = app.config["JWT_IDENTITY_CLAIM"]
    refused: Exception | None = None
    if not in_view and (places := _token_places()):
        for refresh in (False, True):  # a refresh token in a cookie has another name
            with _restored_g():
                try:
                    found = verify_jwt_in_request(optional=True, refresh=refresh, locations=places, verify_type=False)
                except (JWTExtendedException, PyJWTError) as error:
                    refused = refused or error
                else:
                    if found is not None:
                        return _jwt_name(found[1].get(claim)), None
    try:
        # The view's decorator or a hook may have verified a token under other rules, such as in another place.
        return _jwt_name(get_jwt().get(claim)), refused
    except RuntimeError:
        if isinstance(refused, ExpiredSignatureError | RevokedTokenError):
            # This token named its caller in an earlier attempt. Under another name, the retry would run again.
            raise refused from None
        return None, refused


def _token_places() -> list[str]:
    """Return the places where Flask-JWT-Extended may look for a token. It fails on a JSON body that is no object."""
    from flask_jwt_extended.config import config

    places = list(config.token_location)
    if "json" in places and request.is_json and not isinstance(request.get_json(silent=True), dict):
        places.remove("json")
    return places


def _jwt_name(subject: Any) -> str | None:
    return None if subject is None else _subject(subject, "Flask-JWT-Extended")


@contextmanager
def _restored_g() -> Iterator[None]:
    """Remove what the verification leaves in `g`. A view that forgot @jwt_required must not find our token there."""
    before = {name: g.get(name) for name in g if name.startswith(_JWT_NAMES)}
    try:
        yield
    finally:
        for name in [name for name in g if name.startswith(_JWT_NAMES)]:
            g.pop(name)
        for name, value in before.items():
            setattr(g, name, value)


def _subject(user: Any, extension: str) -> str:
    """Return a stable id of this user. Raise `ConfigurationError` if it has none."""
    if not isinstance(user, str | int):
        user = user.get_id() if callable(getattr(user, "get_id", None)) else getattr(user, "id", None)
    if isinstance(user, int) and not isinstance(user, bool):
        return str(user)
    if isinstance(user, str) and user:
        return user
    raise ConfigurationError(
        f"{extension} gives a user without a stable id. Give its user an `id` or a `get_id()`, or register "
        "@idempotency.principal_loader."
    )


def _not_a_token(subject: str, request: Request) -> str:
    """Return this subject. Raise `ConfigurationError` if it is the token that the client sent."""
    sent = [
        text for name in TOKENS if (value := request.headers.get(name)) for text in (value, value.partition(" ")[2])
    ]
    if subject in sent:
        raise ConfigurationError(
            "Flask-HTTPAuth names this caller by the token that it sent. Tokens rotate, and the retry that carries the new one "
            "would run again. Return a user from its callback, or register @idempotency.principal_loader."
        )
    return subject
