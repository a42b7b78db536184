"""What a view may ask of the claim it runs under, and the form field that carries a key."""

from __future__ import annotations

from uuid import uuid4

from flask import current_app, has_request_context, request
from markupsafe import Markup
from werkzeug.exceptions import HTTPException

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import Policy
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.request_state import RequestState, context, current_state


class CurrentClaim:
    """The claim of the request that is being handled. Holds nothing itself: what it tells is the request's.

    False where there is no claim: outside a request, without a key, or when the store was down and the policy let the
    request run unprotected. There the attributes raise `RuntimeError`, so a view that keys are optional for, or that is
    called as a plain function, asks first: `if current_claim: …`.
    """

    def __bool__(self) -> bool:
        return _claim() is not None

    @property
    def key(self) -> str:
        """The client's key, without quotes. Not secret, and not to be trusted more than any other client input."""
        return _state("key").client_key

    @property
    def tenant(self) -> str | None:
        """The tenant that the claim is made for."""
        return _state("tenant").tenant

    @property
    def principal(self) -> str | None:
        """The subject that the claim is made for; None is anonymous."""
        return _state("principal").principal

    @property
    def fence(self) -> int:
        """Rises with every attempt at this key, for ever: for the application's own `WHERE fence <= :mine`."""
        return _held("fence").fence

    @property
    def attempt(self) -> int:
        """1 for the first attempt, more after a vanished worker's claim was taken over."""
        return _held("attempt").attempt

    def point_of_no_return(self) -> None:
        """Say that what follows must not be repeated. Call it right before the first effect outside the database.

        In a request that has no claim there is nothing to protect, and this does nothing: a view with optional keys need
        not ask first. Raises what `Claim.point_of_no_return` raises; let it end the view.
        """
        claim = _claim()
        if claim is not None:
            claim.point_of_no_return()
        elif not has_request_context():
            raise _no_claim("point_of_no_return()")

    def keep_rows(self) -> None:
        """Under `effects="transactional"`: commit this request's rows even if its answer is an error.

        The rows of an answer of 400 and above are rolled back otherwise, for most of those views have broken off half-way.
        A declined payment that is to be written down says so here. Anywhere else this does nothing.
        """
        state = current_state()
        if state is not None:
            state.keeps_rows = True

    def downstream_key(self, name: str) -> str:
        """An idempotency key for a call made on behalf of this one: 52 characters, another for each `name`.

        The same over all attempts, and while secrets are being rotated, so the other side sees one key per intent.
        """
        state = _state("downstream_key()")
        if state.claim is None or state.oldest is None:
            raise _no_claim("downstream_key()")
        return state.oldest.downstream_key(state.claim.oldest_key, name)


current_claim = CurrentClaim()


def idempotency_field(name: str | None = None, *, endpoint: str | None = None) -> Markup:
    """Render a hidden form field with a fresh key, for templates: `{{ idempotency_field() }}`.

    `endpoint` is what the form is sent to, written as for `url_for`: `".pay"` is in the blueprint of this page. Without it
    the form is taken to go to the URL of its page, and the field is named as a POST there reads it. On a page whose URL and
    endpoint take no POST, or whose view is `@exempt`, the name is the application's `form_field`, else the only `form_field`
    of its blueprints and views. Give `name` or `endpoint` if there are several.

    Raises `ConfigurationError` if no policy reads the key from this field: the form would be sent unprotected.
    """
    state = current_app.extensions.get("idempotency")
    if state is None:
        raise ConfigurationError("idempotency_field(): this application has no Idempotency. Call init_app first.")
    if state.policies is None or not state.settings.enabled:
        # Switched off: pages still render as they do elsewhere.
        field = name or state.settings.policy.form_field or "idempotency_key"
    else:
        field = _field_name(state.policies, state.settings.policy, name, endpoint)
    return Markup('<input type="hidden" name="{}" value="{}">').format(field, uuid4())


def _field_name(policies: Policies, base: Policy, name: str | None, endpoint: str | None) -> str:
    here = request.endpoint if has_request_context() else None
    if endpoint is not None:
        if endpoint.startswith("."):
            blueprint = request.blueprint if has_request_context() else None
            endpoint = endpoint[1:] if blueprint is None else blueprint + endpoint
        read = policies.form_fields().get(endpoint)
        if read is None or name not in (None, read):
            raise ConfigurationError(
                f"idempotency_field(): a POST to {endpoint!r} does not read its key from "
                f"{'a form field' if read is None else f'the field {name!r}, but from {read!r}'}. "
                'Give its view form_field="idempotency_key", and check that the endpoint is guarded and takes POST.'
            )
        return read
    found = policies.form_fields()
    names = set(found.values())
    if name is not None:
        if name not in names:
            raise ConfigurationError(f"idempotency_field(): no policy reads the key from the form field {name!r}.")
        return name
    if here is not None and (target := _own_target(here)) is not None:
        if target in found:
            return found[target]
        resolved = policies.resolve(target, "POST")
        if not resolved.exempt or not resolved.chosen:
            raise ConfigurationError(
                f"idempotency_field(): a POST to {target!r}, where the form of this page goes by default, reads no form field, "
                'so the form would be sent unprotected. Give its view @idempotent(form_field="idempotency_key"). If the form '
                "goes to another endpoint, name that one: idempotency_field(endpoint=…)."
            )
    if base.form_field in names:
        return base.form_field
    if len(names) == 1:
        return names.pop()
    raise ConfigurationError(
        "idempotency_field(): no policy reads the key from a form field, so the form would be sent unprotected. Set "
        'IDEMPOTENCY_FORM_FIELD = "idempotency_key", or form_field on the blueprint or view that takes the form.'
        if not names
        else f"idempotency_field(): policies read the key from several fields ({', '.join(sorted(names))}). Say which "
        "endpoint takes this form: idempotency_field(endpoint=…)."
    )


def _own_target(here: str) -> str | None:
    """The endpoint that takes a POST to the URL of this page, else the page's own if it takes one anywhere, else None."""
    try:
        endpoint: str = context.get().url_adapter.match(method="POST")[0]
    except HTTPException:  # another method only, or a redirect
        rules = current_app.url_map.iter_rules(here)
        return here if any("POST" in (rule.methods or ()) for rule in rules) else None
    return endpoint


def _claim() -> Claim | None:
    state = current_state()
    return None if state is None else state.claim


def _state(attribute: str) -> RequestState:
    state = current_state()
    if state is None or state.claim is None:
        raise _no_claim(attribute)
    return state


def _held(attribute: str) -> Claim:
    claim = _claim()
    if claim is None:
        raise _no_claim(attribute)
    return claim


def _no_claim(attribute: str) -> RuntimeError:
    return RuntimeError(
        f"current_claim.{attribute}: this code does not run under a claim. It runs outside a request, the request carried no "
        "idempotency key, or the store was down and the policy lets requests run unprotected. Ask `if current_claim:` "
        "first, or make the key mandatory with @idempotent(required=True)."
    )
