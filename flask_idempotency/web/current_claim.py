"""`current_claim`, which a view reads and marks, and what templates call: `idempotency_field` and `idempotency_script`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar
from uuid import uuid4

from flask import current_app, has_request_context, request
from markupsafe import Markup
from werkzeug.exceptions import HTTPException

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.ending import Running, work_here
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import Policy
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.request_state import context

if TYPE_CHECKING:
    from flask_idempotency.steps.steps import ManualStep, Name
    from flask_idempotency.steps.values import Item

P = ParamSpec("P")
R = TypeVar("R")


class CurrentClaim:
    """The claim of the current request or message, as Flask's `request` is the current request.

    It is false without a claim: outside both, without a key, or if the store was down and the policy let the request
    run unprotected. Its attributes raise `RuntimeError` then. So if keys are optional for your view, or you call it as a
    plain function, test it first: `if current_claim: …`.
    """

    def __bool__(self) -> bool:
        work = work_here()
        return work is not None and work.claim is not None

    @property
    def key(self) -> str:
        """The client's key, without quotes; of a message its id. It is not secret. Trust it no more than other client input."""
        return _claim("key")[0].client_key

    @property
    def tenant(self) -> str | None:
        """The tenant of this claim, or None."""
        return _claim("tenant")[0].tenant

    @property
    def principal(self) -> str | None:
        """The caller of this claim. None: an anonymous caller."""
        return _claim("principal")[0].principal

    @property
    def fence(self) -> int:
        """A number that rises with every attempt at this key. Use it in your own `WHERE fence <= :mine`.

        `flask_idempotency.sql.fenced` writes such an UPDATE for you.
        """
        return _claim("fence")[1].fence

    @property
    def attempt(self) -> int:
        """1 for the first attempt, more if this worker took the claim of a vanished worker over."""
        return _claim("attempt")[1].attempt

    @property
    def finishing(self) -> bool:
        """Whether the janitor finishes this request in its client's place. True in hooks too, before the claim.

        Its `key` is empty then, because the client's key is not stored.
        """
        work = work_here()
        return work is not None and work.finishing is not None

    def point_of_no_return(self) -> None:
        """Declare that the rest of the view must not run twice. Call it right before the first effect outside the database.

        From here on, an expired lease quarantines the key instead of letting a retry run. In a request without a claim it
        does nothing, so you need not test `current_claim` first.

        Raises `LeaseLost` if another worker has the key by now, and `StoreUnavailable` if the store cannot record it. Let
        both end the view: the effect has not happened yet. Raises `RuntimeError` outside a request, and beside steps.
        """
        work = work_here()
        claim = None if work is None else work.claim or work.watch
        if work is not None and claim is not None:
            with work.shield():
                claim.point_of_no_return()
        elif work is None and not has_request_context():
            raise _no_claim("point_of_no_return()")

    def keep_rows(self) -> None:
        """Commit this request's rows under `effects="transactional"`, even if its response is an error.

        Without it, we roll back the rows of a response of 400 and above, because most such views stop half-way. Call it to
        record a declined payment, for example. Under other `effects` it does nothing.
        """
        work = work_here()
        if work is not None:
            work.keeps_rows = True

    def downstream_key(self, name: str, item: Item | None = None) -> str:
        """Return an idempotency key for a call that your view makes: 52 characters, another for each `name` and `item`.

        It is the same in all attempts, and while you rotate secrets, so the other side sees one key per intent. For a durable
        step it is `current_step.downstream_key`: also the same after a rename with `was=`. Raises `RuntimeError` without a
        claim.
        """
        state, claim = _claim("downstream_key()")
        if item is None and claim.steps is None and state.oldest is not None:
            return state.oldest.downstream_key(claim.oldest_key, name)
        from flask_idempotency.steps import steps

        return steps.downstream_key(state, name, item)

    def step(self, name: Name, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run this function as a step, or return what it returned in an earlier attempt. All arguments are the function's.

        `name` is the name of a step that the endpoint lists in `steps=`, or a pair of that name and an item. A coroutine
        function gives an awaitable. Without a claim, the function just runs.

        Raises `StepsChanged`, `StepInDoubt`, `LeaseLost`, `StoreUnavailable` and `NotCommitted`: let them end the view, and
        the client gets the right response. Raises `TypeError` and `RuntimeError` for misuse.
        """
        from flask_idempotency.steps.steps import call_step

        return call_step(name, function, args, kwargs)

    def manual_step(self, name: Name) -> ManualStep:
        """Return a step for code that cannot be a function: `with current_claim.manual_step("charge") as step:`.

        The block runs in every attempt, so test `step.done` first; `step.result` is then the result. Call
        `step.finish(value)` after the effect, or `step.nothing_done()`. If the block ends without either, a plain step is in
        doubt. Raises as `step` does.
        """
        from flask_idempotency.steps.steps import ManualStep

        return ManualStep(name)

    def carry(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return this function such that another thread can call it under this claim, and take steps in it.

        End those threads before the view returns. The function gets no request or application context: add
        `flask.copy_current_request_context` for that.
        """
        from flask_idempotency.steps.steps import carry

        return carry(function)


current_claim: Final = CurrentClaim()


def idempotency_field(name: str | None = None, *, endpoint: str | None = None) -> Markup:
    """Render a hidden form field with a new key, for templates: `{{ idempotency_field() }}`.

    `endpoint` is where the form goes, written as for `url_for`: `".pay"` is in the blueprint of this page. Without it, we
    assume that the form goes to the URL of its page, and take the name that a POST there reads. If that URL takes no POST,
    or its view is `@exempt`, we take the application's `form_field`, else the only `form_field` of its blueprints and views.
    Give `name` or `endpoint` if there are several.

    Raises `ConfigurationError` if no policy reads the key from this field: the form would be unprotected.
    """
    state = current_app.extensions.get("idempotency")
    if state is None:
        raise ConfigurationError("idempotency_field(): this application has no Idempotency. Call init_app first.")
    if state.policies is None or not state.settings.enabled:
        # The extension is switched off: pages must still render.
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
        else f"idempotency_field(): policies read the key from several fields ({', '.join(sorted(names))}). Name the "
        "endpoint that takes this form: idempotency_field(endpoint=…)."
    )


def _own_target(here: str) -> str | None:
    """Return the endpoint that takes a POST to the URL of this page, else the page's own if it takes one, else None."""
    try:
        endpoint: str = context.get().url_adapter.match(method="POST")[0]
    except HTTPException:  # the URL takes other methods only, or redirects
        rules = current_app.url_map.iter_rules(here)
        return here if any("POST" in (rule.methods or ()) for rule in rules) else None
    return endpoint


def idempotency_script(*, nonce: str | None = None) -> Markup:
    """Render the tag that loads the browser module, for templates: `{{ idempotency_script() }}`.

    `nonce` is the one of your Content-Security-Policy. Raises `ConfigurationError` if `IDEMPOTENCY_BROWSER_MODULE` is not
    set: the page would load nothing.
    """
    state = current_app.extensions.get("idempotency")
    url = None if state is None else state.settings.browser_module
    if url is None:
        raise ConfigurationError(
            'idempotency_script(): set IDEMPOTENCY_BROWSER_MODULE = "/idempotency.js", the path that serves the module. If '
            "you serve a copy, write the tag yourself."
        )
    attribute = Markup("") if nonce is None else Markup(' nonce="{}"').format(nonce)
    return Markup('<script type="module" src="{}"{}></script>').format(request.script_root + url, attribute)


def _claim(attribute: str) -> tuple[Running, Claim]:
    """Return what runs here, and its claim. Raises `RuntimeError` if it has none."""
    work = work_here()
    if work is None or work.claim is None:
        raise _no_claim(attribute)
    return work, work.claim


def _no_claim(attribute: str) -> RuntimeError:
    return RuntimeError(
        f"current_claim.{attribute}: this code runs without a claim. It runs outside a request, the request carried no "
        "idempotency key, or the store was down and the policy lets requests run unprotected. Test `if current_claim:` "
        "first, or make the key mandatory with @idempotent(required=True)."
    )
