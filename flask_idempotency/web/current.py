"""What a view may ask of the claim it runs under, and the form field that carries a key."""

from __future__ import annotations

from uuid import uuid4

from flask import current_app, has_request_context
from markupsafe import Markup

from flask_idempotency.engine.claim import Claim
from flask_idempotency.web.visit import Visit, current_visit


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
        return _visit("key").client_key

    @property
    def tenant(self) -> str | None:
        """The tenant that the claim is made for."""
        return _visit("tenant").tenant

    @property
    def principal(self) -> str | None:
        """The subject that the claim is made for; None is anonymous."""
        return _visit("principal").principal

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
        visit = current_visit()
        if visit is not None:
            visit.keeps_rows = True

    def downstream_key(self, name: str) -> str:
        """An idempotency key for a call made on behalf of this one: 52 characters, another for each `name`.

        The same over all attempts, and while secrets are being rotated, so the other side sees one key per intent.
        """
        visit = _visit("downstream_key()")
        if visit.claim is None or visit.oldest is None:
            raise _no_claim("downstream_key()")
        return visit.oldest.downstream_key(visit.claim.oldest_key, name)


current_claim = CurrentClaim()


def idempotency_field(name: str | None = None) -> Markup:
    """A hidden form field with a fresh key, for templates: `{{ idempotency_field() }}`.

    The field is named as the application's `form_field` says; give the name if a blueprint or view says otherwise.
    """
    if name is None:
        name = current_app.extensions["idempotency"].settings.policy.form_field or "idempotency_key"
    return Markup('<input type="hidden" name="{}" value="{}">').format(name, uuid4())


def _claim() -> Claim | None:
    visit = current_visit()
    return None if visit is None else visit.claim


def _visit(attribute: str) -> Visit:
    visit = current_visit()
    if visit is None or visit.claim is None:
        raise _no_claim(attribute)
    return visit


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
