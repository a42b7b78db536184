// Guide: docs/guides/browser.md
const PREFIX = "idempotency:", IGNORE = ["csrf_token"], OPTIONS = Symbol();
const VERDICTS = {
  refused: "missing-key invalid-key request-too-large principal-required misconfigured",
  undone: "truncated-body",
  "in-flight": "in-flight idempotency_key_in_use request_in_progress",
  "key-reused": "key-reused idempotency_payload_mismatch",
  "outcome-unknown": "outcome-unknown record-corrupt commit-unknown",
  done: "response-not-kept replay-forbidden response-erased key-expired",
  voided: "key-voided",
};

export class IdempotencyError extends Error {
  constructor(kind, key, cause, response) {
    super(kind, { cause });
    Object.assign(this, { name: "IdempotencyError", kind, key, response });
  }
}

// UUIDv7, also on insecure pages.
export const newKey = () =>
  ("0" + Date.now().toString(16) + "-7xxx-8xxx-xxxxxxxxxxxx")
    .replace(/.{8}/, "$&-")
    .replace(/x/g, () => (crypto.getRandomValues(new Uint8Array(1))[0] & 15).toString(16));

// Used if storage is forbidden.
const memory = {};
const area = (shared) => {
  try {
    return shared ? localStorage : sessionStorage;
  } catch {
    return memory;
  }
};
const read = (name, shared) => JSON.parse(area(shared)[PREFIX + name] ?? null);
const write = (name, shared, entry) => (area(shared)[PREFIX + name] = JSON.stringify(entry));

// A shared name is overwritten and not removed, so that the entry in the cache is older.
const drop = (name, shared) => (shared ? write(name, shared, { time: Date.now() }) : delete area()[PREFIX + name]);
export const forget = (name) => drop(name) && drop(name, true);

// A shared name is stored twice, and the newer entry counts. Chromium shows one tab what another wrote to localStorage a
// little later, even after it passed the lock on. What a tab put into a cache, the others see at once. Without caches,
// localStorage decides alone.
const cached = async (name, entry) => {
  try {
    const cache = await caches.open(PREFIX), id = "https://x/" + encodeURIComponent(name);
    if (entry) await cache.put(id, new Response(JSON.stringify(entry)));
    return await (await cache.match(id)).json();
  } catch {}
};

export const pending = () =>
  [...new Set([area(), area(true)])]
    .flatMap(Object.entries)
    .filter(([id]) => id.startsWith(PREFIX))
    .map(([, text]) => JSON.parse(text))
    .filter((entry) => entry.state === "sent");

const digest = (text) => {
  let hash = 0;
  for (const unit of text) hash = Math.imul(hash ^ (unit.codePointAt?.() ?? unit), 0x9e3779b1);
  return hash;
};

// A plain form cannot wait until its files are read.
const contentOf = ({ method = "POST", headers, body = "" }, ignore, digests = []) => {
  if (body instanceof FormData || body instanceof URLSearchParams)
    body = [...body]
      .map(([name, value], at) => [name, value.name ?? value, value.size && value.size + (digests[at] ?? value.lastModified)])
      // Flask-WTF puts its prefix before it.
      .filter(([name]) => !ignore.includes(name.replace(/.*-(?=csrf)/, "")));
  else if (typeof body !== "string") throw new TypeError("no text or form");
  return JSON.stringify([method.toUpperCase(), new Headers(headers).get("Content-Type"), body]);
};

// Stored at once, for the second click.
const entryOf = (name, content, { shared, keep = 864e5, opening }, latest) => {
  let old = read(name, shared);
  if (latest?.time > (old?.time ?? 0)) old = latest;
  if (old?.key) {
    const same = old.digest === digest(old.key + content), over = Date.now() - old.time > keep, sent = old.state === "sent";
    if (sent ? !same || over : shared && !same && !over) throw new IdempotencyError(sent ? "unsettled" : "done", old.key);
    if (same && !over && (sent || !old.opening || old.opening === opening)) return { ...old, doubt: true };
  }
  const key = newKey();
  const entry = { name, key, shared, opening, digest: digest(key + content), time: Date.now(), state: "sent" };
  write(name, shared, entry);
  return entry;
};

const isReplayed = (headers) =>
  [...headers].some(([name, value]) => /^(x-)?idempoten.*-replay/.test(name) && /^true$/i.test(value));

// Seconds or NaN. Dates count from the response's.
const retryAfter = (headers) => {
  const text = headers.get("Retry-After");
  return text > 0 ? +text : Math.max(0, Date.parse(text) - (Date.parse(headers.get("Date")) || Date.now())) / 1000;
};

const verdictOf = ({ status, headers }, text) => {
  // Whatever the body says.
  if (headers.get("Idempotency-Status") === "paused") return "paused";
  // The page that a form gets has the code in its link alone.
  let page = /<([^<>]*)>[^<>]*\bdescribedby/.exec(headers.get("Link"))?.[1], code = page?.split(/[/:#]/).pop();
  try {
    const problem = JSON.parse(text), { error, error_code } = problem;
    if (error) {
      ({ code, doc_url: page } = error);
      if (error.type === "idempotency_error" && code !== "idempotency_key_in_use") code = page = "key-reused";
    } else if (error_code) code = error_code;
    else ({ code, type: page } = problem);
    if (!/^idempotency_|^request_in/.test(code)) {
      code = code.replaceAll("_", "-");
      if (`${page}`.split(/[/:#]/).pop() !== code) code = 0;
    }
  } catch {}
  const known = Object.keys(VERDICTS).find((verdict) => VERDICTS[verdict].split(" ").includes(code));
  const replayed = isReplayed(headers), should = headers.get("Stripe-Should-Retry");
  if (known && (known === "done" || !replayed) && (status >= 400 || code === "response-not-kept")) return known;
  if (replayed || should === "false") return "return";
  if (/42[59]/.test(status)) return "undone";
  if (status === 409 && (headers.has("Retry-After") || should === "true")) return "in-flight";
  return should === "true" || /^5(?!0[15])/.test(status) ? "retry" : "return";
};

// Over http, Chromium takes a reply that is cut in its head for a whole one.
const isTorn = ({ url, status, redirected, headers, type }, size) =>
  /^http:/.test(url) && status !== 204 &&
  // Its Location may be cut.
  ((redirected && status >= 400) ||
    (headers.get("Content-Length") !== `${size}` &&
      !(size && (type === "cors" || headers.has("Content-Encoding") || headers.has("Transfer-Encoding")))));

export async function send(name, url, init = {}, options) {
  options = { ...init, ...options };
  const { header = "Idempotency-Key", attempts = 5, deadline = 45000, ignore = IGNORE, shared, field } = options;
  const digests = [];
  // A page may make a file of the same content again. A large one takes too long to read.
  if (init.body instanceof FormData)
    for (const [, file] of init.body) digests.push(file.size < 8e6 ? digest(new Uint8Array(await file.arrayBuffer())) : null);
  const content = contentOf(init, ignore, digests), end = Date.now() + deadline;
  const signal = AbortSignal.any([AbortSignal.timeout(deadline), init.signal].filter(Boolean));
  // Throws if it is invalid.
  new Request(url, { method: "POST", ...init });
  if (!name) throw new TypeError("no name");
  let entry = !shared && entryOf(name, content, options), begun;

  const run = async () => {
    begun = true;
    // One tab at a time.
    if (shared) await cached(name, (entry = entryOf(name, content, options, await cached(name))));
    // The first click may have ended it.
    read(name, shared) ?? write(name, shared, entry);
    const { key, opening } = entry, headers = new Headers(init.headers);
    let { doubt } = entry, counted = 0, waits = 0, cause;
    const settle = (keep) => {
      if (read(name, shared)?.key !== key) return;
      keep ? write(name, shared, { ...entry, state: "done", opening: doubt ? 0 : opening }) : drop(name, shared);
    };
    headers.set(header, key);
    if (field) init.body.set(field, key);
    for (;;) {
      let response, verdict = "retry";
      try {
        // A refused connection looks like a lost reply. While no HEAD gets through, no attempt is spent.
        if (cause) await fetch(url, { method: "HEAD", mode: "no-cors", signal });
        cause = void counted++;
        response = await fetch(url, { method: "POST", ...init, headers, signal });
        // A new Response would have no url.
        const body = await response.clone().blob();
        if (isTorn(response, body.size)) throw new TypeError("torn");
        verdict = verdictOf(response, await body.text());
      } catch (error) {
        response = void (cause = error);
      }
      const running = verdict === "in-flight", paused = verdict === "paused", lost = paused || verdict === "retry";
      doubt ||= running || lost;
      if (running ? counted-- : (lost || verdict === "undone") && counted < attempts) {
        const wait =
          ((response && retryAfter(response.headers)) || +running) * 1000 +
          Math.random() * (100 << Math.min(waits++, response ? 2 : 5));
        if (!signal.aborted && Date.now() + wait < end) {
          await new Promise((resolve) => setTimeout((signal.onabort = resolve), wait));
          if (!signal.aborted) continue;
        }
      }
      // It settles nothing.
      if (paused) return response;
      if (verdict === "return") {
        const { status, redirected } = response, replayed = isReplayed(response.headers);
        const kept = status < 500 && !/^0|30[78]|40[1378]|4[12]9|42[15]/.test(status);
        if (status >= 500 || kept || replayed || !doubt) {
          // Or a sign-in.
          if (kept && status < 400) settle(shared || (redirected && (opening || doubt)));
          else if (status < 500 && (replayed ? status >= 400 : !redirected && !doubt)) settle();
          return response;
        }
      }
      if (verdict === "done") settle(shared);
      if (/^re|^u/.test(verdict)) verdict = doubt ? "outcome-unknown" : "refused";
      if (/^refused|voided/.test(verdict)) settle();
      throw new IdempotencyError(verdict, key, cause, response);
    }
  };

  try {
    return await navigator.locks.request(PREFIX + (shared ? name : entry.key), { signal }, run);
  } catch (cause) {
    if (begun) throw cause;
    // Without locks the service decides.
    return run();
  }
}

// Asks the status view at `url` to void the key of the request to `path`. Resolves to "voided"; to "done" or "expired" if it
// is too late; to nothing if no request of this name is pending here.
export async function cancel(name, url, { method = "POST", path, header = "Idempotency-Key", shared, keep = 864e5, ...init }) {
  const { key, time } = read(name, shared) ?? {}, headers = { ...init.headers, [header]: key };
  if (!key) return;
  // The service may have forgotten it.
  if (Date.now() - time > keep) throw new IdempotencyError("unsettled", key);
  const response = await fetch(url + "?" + new URLSearchParams({ method, path }), { ...init, headers, method: "DELETE" });
  const { state, code = "outcome-unknown" } = await response.json().catch(() => 0);
  if (state === "voided" && read(name, shared)?.key === key) drop(name, shared);
  // One of these three.
  if (/^[dev]/.test(state)) return state;
  throw new IdempotencyError(code, key, 0, response);
}

const onSubmit = async (event) => {
  const { target: form, submitter } = event, options = form[OPTIONS];
  // form.action may be an input.
  const attribute = (name) => submitter?.getAttribute("form" + name) ?? form.getAttribute(name) ?? "";
  if (event.defaultPrevented || !/^post$/i.test(attribute("method"))) return;
  const { field = "idempotency_key", name = form.getAttribute("id") || location.pathname } = options;
  const url = attribute("action") || location.href, body = new FormData(form, submitter);
  const ignore = [field, ...(options.ignore ?? IGNORE)];
  // Lasts over reload and back.
  const opening = (options.opening ??= history.state?.idempotency ?? newKey());
  history.replaceState({ ...history.state, idempotency: opening }, "");
  if (options.fetch) {
    event.preventDefault();
    let error;
    const response = await send(name, url, { body }, { ignore, field, opening }).catch((cause) => void (error = cause));
    const ended = new CustomEvent("idempotency", { bubbles: true, cancelable: true, detail: { response, error } });
    if (form.dispatchEvent(ended) && response?.redirected) location = response.url;
    return;
  }
  // Each content has its key.
  const full = [opening, name, digest(url + contentOf({ body }, ignore))].join();
  const { key } = read(full) ?? { key: newKey() };
  write(full, false, { key });
  const input = form.querySelector(`[name="${field}"]`) ?? form.appendChild(document.createElement("input"));
  Object.assign(input, { type: "hidden", name: field, value: key });
};

export const enhance = (form, options) => {
  form[OPTIONS] = { ...options };
  form.addEventListener("submit", onSubmit);
};

// Also later forms.
globalThis.document?.addEventListener("submit", (event) => {
  const { target } = event, how = target.getAttribute("data-idempotent");
  if (how === null || target[OPTIONS]) return;
  enhance(target, { fetch: how === "fetch" });
  onSubmit(event);
});
