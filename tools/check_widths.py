"""Opens every page of the built site in Chromium, as wide as a phone and as a laptop, and fails
where a page can be scrolled sideways, or where text has a contrast below 4.5 with what is behind
it, in light and in dark: `python tools/check_widths.py site`. A table or a code block that scrolls
by itself is no fault.
"""

import functools
import html
import http.server
import re
import shutil
import sys
import tempfile
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "show"))

import chromium  # noqa: E402

WIDTHS = (390, 1280)
# Each page in a frame, one after the other; what is too wide is written into the title at the end.
SCRIPT = """<!doctype html><title>unfinished</title><script>
const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
function luminance(colours) {  // of colours that are painted over each other
  for (const colour of ["#fff", ...colours]) {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
  }
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(c => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function faint(root) {  // what is hard to read, each kind once
  const found = new Map();
  const tags = "p, li, a, td, th, h1, h2, h3, code, span, label, small";
  for (const element of root.querySelectorAll(tags)) {
    const text = [...element.childNodes].filter(n => n.nodeType == 3).map(n => n.data).join("");
    if (!text.trim() || element.closest("svg, .output, .headerlink")) continue;
    if (!element.getClientRects().length) continue;
    const behind = [];
    for (let e = element; e; e = e.parentElement)
      behind.unshift(getComputedStyle(e).backgroundColor);
    const colour = getComputedStyle(element).color;
    const both = [luminance(behind), luminance([...behind, colour])].sort((a, b) => b - a);
    const ratio = (both[0] + 0.05) / (both[1] + 0.05);
    if (ratio < 4.5) found.set(element.tagName + element.className, [ratio, text.trim()]);
  }
  return [...found].map(
    ([kind, [ratio, text]]) => `${kind} "${text.slice(0, 30)}" ${ratio.toFixed(2)}`);
}
async function measure() {
  const found = [];
  for (const width of WIDTHS) for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style = `border: 0; width: ${width}px; height: 900px`;
    const loaded = new Promise(done => frame.onload = done);
    frame.src = page;
    document.body.append(frame);
    await loaded;
    const root = frame.contentDocument.documentElement;
    const still = frame.contentDocument.createElement("style");
    still.textContent = "* { transition: none !important }";
    root.append(still);
    if (root.scrollWidth > root.clientWidth)
      found.push(`${page}: ${root.scrollWidth} of ${width} pixels`);
    if (width == 1280) for (const scheme of ["default", "slate"]) {
      frame.contentDocument.body.dataset.mdColorScheme = scheme;
      found.push(...faint(root).map(what => `${page}, ${scheme}: contrast of ${what}`));
    }
    frame.remove();
  }
  document.title = "finished " + found.join(" | ");
}
onload = measure;
</script><body></body>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def title(browser: str, site: Path) -> str:
    pages = sorted(f"/{path.relative_to(site)}" for path in site.rglob("index.html"))
    script = SCRIPT.replace("WIDTHS", str(list(WIDTHS))).replace("PAGES", str(pages))
    with tempfile.TemporaryDirectory() as folder:
        # The site as it is, and one page more.
        shutil.copytree(site, folder, dirs_exist_ok=True)
        Path(folder, "widths.html").write_text(script, encoding="utf-8")
        handler = functools.partial(Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/widths.html"
            options = ["--virtual-time-budget=300000", "--dump-dom", address]
            done = chromium.start(browser, *options, timeout=500)
            server.shutdown()
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    return html.unescape(found[1]) if found else done.stderr


def main(site: Path) -> str:
    browser = chromium.find()
    if browser is None:
        return "there is no Chromium here"
    for _ in range(3):  # Chromium gives up where a busy machine takes too long
        said = title(browser, site)
        if said.startswith("finished "):
            return said.removeprefix("finished ").replace(" | ", "\n")
    return said


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()) or 0)
