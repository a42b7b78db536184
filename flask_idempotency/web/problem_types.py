"""The table of all problems: the words that clients, documents and the pages of problems have for each code.

`docs/generate.py` makes the pages under docs/problems from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flask_idempotency.engine.values import valueclass


@valueclass(frozen=True, slots=True)
class ProblemType:
    """One row of the table: what all problems with this code share."""

    code: str
    status: int | None
    """None: the status of the first response."""
    title: str
    detail: str
    happened: str
    """For the problem's page: what happened. The first sentence stands in the list of all problems."""
    remedy: str
    """For the problem's page: what the client does next."""
    again: str = "no"
    """For the list of all problems: whether to send the same request again."""
    stripe_type: str = "invalid_request_error"
    stripe_code: str | None = None
    playbook_code: str | None = None

    @property
    def retry(self) -> bool:
        """Whether the same request under the same key, sent again by a machine, can end better."""
        return self.again.startswith("yes")


_ROWS = (
    ProblemType(
        code="missing-key",
        status=400,
        title="Idempotency key missing",
        detail="This operation needs an idempotency key and the request carries none. Nothing was done.",
        happened="The endpoint needs an idempotency key, and the request has none. The server did nothing.",
        remedy=(
            "Make one new key, such as a random UUID, for each thing that you want to happen once. Store it before you "
            "send the request. Send the same key with every attempt."
        ),
        again="with a key",
    ),
    ProblemType(
        code="invalid-key",
        status=400,
        title="Idempotency key not valid",
        detail="The request's idempotency key cannot be used. Nothing was done.",
        happened=(
            "The server cannot use the key: it is empty, too long, sent twice or in another format. The server did "
            "nothing; `detail` names the fault."
        ),
        remedy=(
            "Send one header line with visible ASCII characters, at most as long as the API documents. The same request "
            "fails again."
        ),
        again="with a valid key",
    ),
    ProblemType(
        code="unknown-operation",
        status=400,
        title="No such operation with idempotency keys",
        detail=(
            "`method` and `path` must name one operation of this service that takes idempotency keys. The key was not "
            "looked up."
        ),
        happened=(
            "You asked for the status of a key, and `method` and `path` name no operation that takes keys. The service did "
            "not look the key up, so this says nothing about the request."
        ),
        remedy=(
            "Send `method` and `path` as you sent them with the key, such as `?method=POST&path=/payments`. Each must occur "
            "once. The path begins at the host, and has a query only if the tenant or the caller is in it. Do not take "
            "this for `absent`."
        ),
        again="with the operation",
    ),
    ProblemType(
        code="truncated-body",
        status=400,
        title="Request body incomplete",
        detail="The body ended before the announced Content-Length. Nothing was done; send the request again.",
        happened="Fewer bytes arrived than `Content-Length` announced. The server did nothing, and the key is unused.",
        remedy=(
            "Send the whole request again with the same key. If it fails every time, your client or a proxy computes "
            "`Content-Length` wrongly."
        ),
        again="yes",
    ),
    ProblemType(
        code="request-too-large",
        status=413,
        title="Request body too large",
        detail="The body is larger than this operation accepts with an idempotency key. Nothing was done.",
        happened=(
            "The request's body is longer than the endpoint accepts with a key. The server did nothing, and the key is "
            "unused."
        ),
        remedy="Send less, or send several requests, each with its own key. The same request fails again.",
    ),
    ProblemType(
        code="in-flight",
        status=409,
        title="The first request is still running",
        detail=(
            "A request with this idempotency key is still running. Send it again with the same key to get its response."
        ),
        happened="An earlier attempt with this key is still running. This attempt did nothing.",
        remedy=(
            "Wait for `Retry-After` seconds, and send the same request with the same key. You get the response of the "
            "first attempt once it exists. Do not change the key: a new key starts a second run."
        ),
        again="yes, after `Retry-After`",
        stripe_code="idempotency_key_in_use",
        playbook_code="request_in_progress",
    ),
    ProblemType(
        code="key-reused",
        status=422,
        title="Idempotency key used for another request",
        detail=(
            "This idempotency key belongs to a request with another method, path, query or payload. Nothing was done."
        ),
        happened=(
            "The key belongs to a request with another method, path, query or payload. This request did nothing, and the "
            "first one is unchanged."
        ),
        remedy="To repeat the first request, send exactly what you sent then. For a new request, use a new key.",
        stripe_type="idempotency_error",
        playbook_code="idempotency_payload_mismatch",
    ),
    ProblemType(
        code="key-voided",
        status=409,
        title="This idempotency key was voided",
        detail="The key was voided, so no request runs under it. This request did nothing.",
        happened=(
            "You or the operator of the service have voided the key. No request runs under it as long as the service "
            "remembers it, and this one did nothing."
        ),
        remedy="If you still want it to happen, send the request under a new key. Otherwise you are done.",
    ),
    ProblemType(
        code="void-not-offered",
        status=405,
        title="Keys of this operation cannot be voided",
        detail="This operation does not let its clients void keys. The key is as it was.",
        happened="You asked to void a key, and the policy of its operation does not allow that. Nothing was changed.",
        remedy="Ask for the status of the key with GET. To void keys, the service sets `void=True` for the operation.",
    ),
    ProblemType(
        code="outcome-unknown",
        status=409,
        title="It is unknown whether the first request was carried out",
        detail=(
            "The first request with this idempotency key failed or was interrupted, and how far it came is not known. The "
            "request will not run again until that is settled."
        ),
        happened=(
            "The first attempt failed or was interrupted, and the service does not know how far it came. It does not run "
            "the request again, because that could do it twice."
        ),
        remedy=(
            "Do not send the request under a new key. Look up whether it took effect, or contact the operator of the "
            "service. Retries get this problem until the service has found out. Then the same key gets the real "
            "response, or runs if the first attempt had no effect."
        ),
        again="no: look it up",
        stripe_type="api_error",
    ),
    ProblemType(
        code="store-unavailable",
        status=503,
        title="Idempotency records cannot be reached",
        detail=(
            "It is not known whether this request has been carried out. Send it again with the same key: it is not "
            "carried out twice."
        ),
        happened=(
            "The service cannot reach its idempotency records, or the keys that open them, or has no room for the body of "
            "the request. Most such requests did not start. If one did, either its changes and its record were both kept, or "
            "neither."
        ),
        remedy=(
            "Send the same request with the same key after `Retry-After`. It does not run twice. Do not change the key."
        ),
        again="yes, after `Retry-After`",
        stripe_type="api_error",
    ),
    ProblemType(
        code="memory-lost",
        status=503,
        title="Idempotency records may have been forgotten",
        detail=(
            "The service cannot tell whether this request was carried out before, because it has lost some of its records. "
            "Nothing was done now. Send it again later with the same key. The operator of the service lets it run with "
            "`flask idempotency redis ack`, at the risk that requests whose records were lost run a second time."
        ),
        happened=(
            "The service does not know this key, and it has lost records that it should have. Its store was restarted, "
            "failed over, emptied or replaced. An earlier attempt may have run; this one did nothing."
        ),
        remedy=(
            "Send the request again with the same key after `Retry-After`. Once the operator has acknowledged the loss, "
            "it runs, or gets the response of the first attempt. If this was your first attempt, it has not run. Do not "
            "send a request under a new key if you may have sent it before: look up first whether it took effect. A key "
            "that states when it was made (UUID version 7 or ULID) runs immediately if that was after the loss."
        ),
        again="yes, after `Retry-After`",
        stripe_type="api_error",
    ),
    ProblemType(
        code="not-committed",
        status=500,
        title="The request's changes were rolled back",
        detail="Nothing of this request was kept: its changes were rolled back, and its idempotency key is free again.",
        happened=(
            "The view ran, and then its changes were rolled back: the database refused them, or the service's rules did "
            "not let the response stand. No change was kept, and the key is free."
        ),
        remedy=(
            "Send the request again with the same key: that is safe and runs it again. If it ends the same way, the "
            "request contradicts the stored data, or the service's rules are wrong. The service's log names the cause."
        ),
        again="yes",
        stripe_type="api_error",
    ),
    ProblemType(
        code="commit-unknown",
        status=500,
        title="It is unknown whether the request's changes were kept",
        detail="The database did not say whether it has kept this request's changes, and the request carries no key.",
        happened=(
            "The database did not confirm whether it kept the request's changes, and the request has no key. The changes "
            "may exist or not."
        ),
        remedy=(
            "Look up first whether the changes exist. Without a key the server cannot recognise a repetition, and may "
            "make them again. A request with a key never gets this problem."
        ),
        again="no: it may run twice",
        stripe_type="api_error",
    ),
    ProblemType(
        code="transaction-conflict",
        status=503,
        title="Another request changed the same data at the same moment",
        detail="Nothing of this request was kept: its changes were rolled back. Send it again with the same key.",
        happened=(
            "The database ended this transaction to let another one finish: a serialization failure, a deadlock, or a "
            "lock that took too long. No change was kept, and the key is free."
        ),
        remedy="Send the same request with the same key after `Retry-After`. It usually succeeds.",
        again="yes, after `Retry-After`",
        stripe_type="api_error",
    ),
    ProblemType(
        code="request-paused",
        status=503,
        title="The request is paused",
        detail="Part of this was done and is remembered. Send it again with the same key.",
        happened=(
            "The request takes several steps, and the service could not go on before one of them. It remembers the steps "
            "that finished: none of them runs again."
        ),
        remedy=(
            "Send the same request with the same key after `Retry-After`. It goes on after the finished steps. Do not "
            "change the key: a new key repeats them."
        ),
        again="yes, after `Retry-After`",
        stripe_type="api_error",
    ),
    ProblemType(
        code="response-not-kept",
        status=None,
        title="Done before; the response body was not kept",
        detail=(
            "This request was carried out when it was first sent, with this status. Its response was too large or could "
            "not be stored, so the body cannot be sent again."
        ),
        happened=(
            "The request ran once, with this status, and its body was not kept. It was too large, could not be stored, or "
            "was cut off. This attempt did nothing."
        ),
        remedy=(
            "Read the present state of the resource with a GET, at `Location` if there is one. A retry gets this problem "
            "again."
        ),
        again="no: done before",
        stripe_type="api_error",
    ),
    ProblemType(
        code="response-erased",
        status=410,
        title="Done before; the response was erased",
        detail=(
            "This request was carried out when it was first sent, and its response has been erased since. It does not "
            "run again."
        ),
        happened=(
            "The request ran once, and its response was erased with all responses of its tenant. This attempt did "
            "nothing."
        ),
        remedy=(
            "Read the present state of the resource with a GET. A retry gets this problem as long as the service "
            "remembers the key."
        ),
        again="no: done before",
    ),
    ProblemType(
        code="key-expired",
        status=410,
        title="Done before; the response is no longer kept",
        detail=(
            "This request was carried out when it was first sent, and its response is no longer kept. It does not run "
            "again."
        ),
        happened=(
            "The request ran once. The service has deleted its response, and still remembers its key. This attempt did "
            "nothing."
        ),
        remedy=(
            "Read the present state of the resource with a GET. To run the request a second time on purpose, send it with "
            "a new key."
        ),
        again="no: done before",
    ),
    ProblemType(
        code="quota-exceeded",
        status=429,
        title="No more new idempotency keys for now",
        detail="The tenant has as much as it may, so no new idempotency key is accepted for now. Nothing was done.",
        happened=(
            "The tenant has reached a limit on live records, stored bytes, running requests or new keys. The server did "
            "nothing, and the key is unused. `detail` and the `RateLimit` field name the limit."
        ),
        remedy="Send the same request with the same key after `Retry-After`. Retries with known keys always pass.",
        again="yes, after `Retry-After`",
        stripe_type="rate_limit_error",
        stripe_code="rate_limit",
    ),
    ProblemType(
        code="replay-forbidden",
        status=403,
        title="The stored response may not be shown",
        detail=(
            "This request was handled before, and its response may no longer be given to this caller. Nothing was done."
        ),
        happened=(
            "A response is stored for this key, and the caller has lost the permission to see it. This attempt did "
            "nothing, and the response stays stored."
        ),
        remedy="A retry succeeds only once the permission is back.",
    ),
    ProblemType(
        code="principal-required",
        status=403,
        title="The caller is unknown",
        detail="Idempotency keys are accepted from identified callers only. Nothing was done.",
        happened=(
            "Keys belong to callers, and the service does not know who is calling. The server did nothing, and the key "
            "is unused."
        ),
        remedy=(
            "With status 403, authenticate and send the request again; you may use the same key. With status 500, the "
            "service lacks a setting, and a retry does not help: its log names the remedy."
        ),
        again="after you authenticate",
    ),
    ProblemType(
        code="misconfigured",
        status=500,
        title="The operation is not set up correctly",
        detail="The idempotency settings of this operation cannot hold, so it does not run. This request did nothing.",
        happened=(
            "The service cannot protect this endpoint from running twice, because its settings contradict each other or "
            "a part is missing. So the endpoint does not run. Other endpoints do."
        ),
        remedy=(
            "Contact the operator of the service: its log names the fault and the remedy. A retry does not help "
            "until the settings are corrected. Keep the key: an earlier request with it may have run."
        ),
        stripe_type="api_error",
    ),
    ProblemType(
        code="record-corrupt",
        status=500,
        title="The stored response cannot be read",
        detail=(
            "This request was handled before, and the record of its response is damaged. It was not run again; the "
            "service's operator has to look at it."
        ),
        happened=(
            "The record of this key exists, and it cannot be read: it is damaged, was changed, or the key that opens it "
            "is gone. The request does not run again, because it ran before."
        ),
        remedy=(
            "Do not send the request under a new key. Look up whether it took effect, or contact the operator. Retries "
            "get this problem."
        ),
        again="no: look it up",
        stripe_type="api_error",
    ),
)

PROBLEMS: Mapping[str, ProblemType] = MappingProxyType({row.code: row for row in _ROWS})
"""The rows by code."""
