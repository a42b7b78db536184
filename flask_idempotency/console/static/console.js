// Refreshes the numbers of a page: it fetches the same page again and replaces the parts marked data-live.
// A page is complete without it. It changes nothing while you are in a part, have selected text there, or look elsewhere.
const EVERY = 10_000, LONGEST = 300_000;
const parts = () => document.querySelectorAll("[data-live]");
const status = document.querySelector("[data-status]");
let wait = EVERY, timer, running;

function say(text) {
  // Only when it changes: a screen reader reads this part aloud.
  if (status && status.textContent !== text) status.textContent = text;
}

function isBusy(part) {
  const selection = getSelection();
  return part.contains(document.activeElement)
    || (selection && !selection.isCollapsed && part.contains(selection.anchorNode));
}

function replace(fresh) {
  document.title = fresh.title;
  const [icon, shown] = [fresh, document].map((each) => each.querySelector("link[rel=icon]"));
  if (icon && shown && icon.getAttribute("href") !== shown.getAttribute("href")) shown.replaceWith(document.importNode(icon));
  for (const part of parts()) {
    const next = fresh.querySelector(`[data-live="${CSS.escape(part.dataset.live)}"]`);
    if (!next || isBusy(part) || next.innerHTML === part.innerHTML) continue;
    const open = [...part.querySelectorAll("details")].map((each) => each.open);
    const places = [...part.querySelectorAll(".scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
    part.replaceChildren(...document.importNode(next, true).childNodes);
    part.querySelectorAll("details").forEach((each, number) => { each.open = open[number] ?? false; });
    part.querySelectorAll(".scroll").forEach((each, number) => {
      [each.scrollLeft, each.scrollTop] = places[number] ?? [0, 0];
    });
  }
}

async function refresh() {
  if (document.hidden) return; // `visibilitychange` asks again
  running = new AbortController();
  try {
    const response = await fetch(location.href, {
      credentials: "same-origin", cache: "no-store", redirect: "error", signal: running.signal,
    });
    if (!response.ok) throw new Error(String(response.status));
    replace(new DOMParser().parseFromString(await response.text(), "text/html"));
    wait = EVERY;
    say("");
    look();
  } catch (error) {
    if (error.name === "AbortError") return;
    wait = Math.min(wait * 2, LONGEST);
    say(`The numbers could not be refreshed. Next try in ${Math.round(wait / 1000)} s.`);
  }
  plan();
}

// The overview shows the faults that its process knows of. Looking at Health takes long, so no page waits for it.
let looked = -Infinity;
function look() {
  const link = document.querySelector("a[data-look]");
  if (!link || performance.now() - looked < 60_000) return;
  looked = performance.now();
  fetch(link.href, { credentials: "same-origin", cache: "no-store", redirect: "error" }).then(refresh, () => {});
}

function plan() {
  clearTimeout(timer);
  if (!document.hidden && parts().length) timer = setTimeout(refresh, wait);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
    running?.abort();
  } else {
    refresh();
  }
});
plan();
look();
