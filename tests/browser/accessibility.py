"""Ask axe-core about the page that is open, and measure what no tool of rules measures: text that is cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.browser.chromium import Browser

SCRIPT: Final = Path(__file__).parent / "axe" / "axe.min.js"

RULES: Final = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
"""The sets of rules, by their tags: WCAG 2.2 at level AA, and what its authors advise beside it."""

ASK: Final = """
const [values, done] = arguments;
axe.run(document, { runOnly: { type: "tag", values }, resultTypes: ["violations"] }).then(
  (found) => done({ checked: found.passes.length, violations: found.violations }),
  (error) => done({ error: String(error) }),
);
"""

CUT: Final = """
const width = document.documentElement.clientWidth;
const faults = [];
const name = (element) => `<${element.localName} class="${element.className}"> ${element.textContent.trim().slice(0, 60)}`;
if (document.documentElement.scrollWidth > width) {
  faults.push(`the page is ${document.documentElement.scrollWidth} pixels wide, the window ${width}`);
}
const scrolls = (element) => {
  for (; element && element !== document.body; element = element.parentElement) {
    if (/auto|scroll/.test(getComputedStyle(element).overflowX)) return true;
  }
  return false;
};
// Text for screen readers only: a box of one pixel.
const unseen = (element) => element.closest("title, desc, script, style, [hidden]") || !element.checkVisibility();
for (const element of document.body.querySelectorAll("*")) {
  if (unseen(element) || element.clientWidth === 1) continue;
  if (element.closest("svg")) {
    const [text, frame] = [element.getBoundingClientRect(), element.closest("svg").getBoundingClientRect()];
    const over = text.left < frame.left - 1 || text.right > frame.right + 1 || text.bottom > frame.bottom + 1
      || text.top < frame.top - 1;
    if (element.localName === "text" && over) faults.push(`cut in a chart: ${element.textContent}`);
    continue;
  }
  const style = getComputedStyle(element);
  // The text in a field may be longer than the field: it scrolls with the cursor.
  const field = element.localName === "input";
  const clips = !field && /hidden|clip/.test(style.overflowX) && element.scrollWidth > element.clientWidth + 1;
  const clipsBelow = /hidden|clip/.test(style.overflowY) && element.scrollHeight > element.clientHeight + 1;
  if (clips || clipsBelow) faults.push(`cut: ${name(element)}`);
  const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!own && !/input|select|textarea|button/.test(element.localName)) continue;
  const box = element.getBoundingClientRect();
  const outside = box.right + scrollX > width + 1 || box.left + scrollX < -1;
  if (box.width && outside && !scrolls(element) && style.position !== "absolute") {
    faults.push(`outside of the window: ${name(element)}`);
  }
}
return faults;
"""


@cache
def axe() -> str:
    return SCRIPT.read_text(encoding="utf-8")


def violations(browser: Browser) -> list[str]:
    """Run axe-core in the page that is open. Return a paragraph for each rule that the page breaks, with the elements."""
    if not browser.run("return typeof axe === 'object'"):
        browser.run(axe())
    found: dict[str, Any] = browser.driver.execute_async_script(ASK, list(RULES))
    if "error" in found or not found["checked"]:
        raise AssertionError(f"axe checked nothing: {found}")
    return [_paragraph(violation) for violation in found["violations"]]


def cut(browser: Browser) -> list[str]:
    """Return what of the page that is open needs sideways scrolling, or is cut off. A table may scroll in a box."""
    faults: list[str] = browser.run(CUT)
    return faults


def _paragraph(violation: dict[str, Any]) -> str:
    """Return a rule that is broken, what to read about it, and for each element where it is and what is wrong."""
    lines = [f"{violation['id']} ({violation['impact']}): {violation['help']}. See {violation['helpUrl']}"]
    for node in violation["nodes"]:
        lines.append(f"  {' '.join(map(str, node['target']))}: {node['html'][:200]}")
        lines += [f"    {line.strip()}" for line in (node["failureSummary"] or "").splitlines()[1:]]
    return "\n".join(lines)
