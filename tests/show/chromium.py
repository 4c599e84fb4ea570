"""Chromium without a window, for pages.

python tests/show/chromium.py            prints where it is; status 1 if it is nowhere
python tests/show/chromium.py FOLDER     writes pictures of what notebooks show
"""

import shutil
import subprocess
import sys
import tempfile
from html import escape, unescape
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
THEMES = {"light": "background: #fff; color: #1f1f1f", "dark": "background: #111; color: #ddd"}
WIDTHS = (390, 800, 1280)
# Of JupyterLab, whose tables look different.
_JUPYTER = """
.notebook table { border-collapse: collapse; border: none; font-size: 12px; table-layout: fixed; }
.notebook td, .notebook th, .notebook tr { text-align: right; vertical-align: middle;
  padding: 0.5em 0.5em; line-height: normal; white-space: normal; max-width: none; border: none; }
.notebook pre, .notebook p { margin: 0 0 1em; }
"""


def find() -> str | None:
    """A Chromium that runs: on Ubuntu there is a script of that name that doesn't."""
    for path in filter(None, map(shutil.which, NAMES)):
        done = subprocess.run([path, "--version"], capture_output=True, timeout=250)
        if done.returncode == 0:
            return path
    return None


def start(path: str, *options: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Chromium, run to its end, with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # As root, as which a container often runs; and without the shared memory that it lacks.
        always = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        command = [path, *always, "--no-first-run", f"--user-data-dir={profile}", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def run(path: str, *options: str) -> str:
    done = start(path, *options, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(html: str, theme: str) -> str:
    """A notebook's output as a document."""
    style = f"<style>body {{ margin: 8px; {THEMES[theme]} }}{_JUPYTER}</style>"
    return f'<!doctype html><meta charset="utf-8">{style}<div class="notebook">{html}</div>'


def frame(name: str, html: str, theme: str, width: int, height: int = 800) -> str:
    """A document in a frame of this width: windows can't be as narrow as a telephone."""
    inside = escape(document(html, theme))
    size = f'width="{width}" height="{height}" style="border: 0; display: block"'
    return f'<iframe id="{escape(name)}" {size} srcdoc="{inside}"></iframe>'


def measure(path: str, frames: list[str]) -> str:
    """The JSON that `measure.js` makes of frames."""
    script = Path(__file__).with_name("measure.js").read_text()
    page = f'<!doctype html><meta charset="utf-8">{"".join(frames)}<script>{script}</script>'
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_text(page)
        dom = run(path, "--dump-dom", file.as_uri())
    found = unescape(dom.partition('<pre id="measured">')[2].partition("</pre>")[0])
    assert found, dom
    return found


def picture(path: str, target: Path, html: str, theme: str, width: int, height: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        body = frame("page", html, theme, width, height)
        file.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin: 0">{body}')
        run(
            path,
            f"--screenshot={target}",
            f"--window-size={width},{height}",
            "--hide-scrollbars",
            file.as_uri(),
        )


def main() -> None:
    path = find()
    if path is None:
        sys.exit(f"there is no Chromium here: {', '.join(NAMES)}")
    print(path)
    if sys.argv[1:]:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        import notebook_pages as pages

        for name in pages.SHOWN:
            for theme in THEMES:
                for width in WIDTHS:
                    target = Path(sys.argv[1], f"{name}-{theme}-{width}.png")
                    picture(path, target, pages.html_of(name), theme, width, 900)


if __name__ == "__main__":
    main()
