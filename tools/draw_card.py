"""Draws the picture that social networks show of the site: `python tools/draw_card.py` writes
docs/assets/card.png, with README's first sentence, its lines of the diff and its picture.

It needs Chromium.
"""

import html
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "show"))

import chromium  # noqa: E402

SIZE = 1200, 630
CARD = ROOT / "docs" / "assets" / "card.png"

_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; width: 1200px; height: 630px; background: #fff; color: #1f2430; display: grid;
  grid-template: 1fr auto / 640px 1fr; gap: 18px 40px; box-sizing: border-box;
  padding: 30px 56px 30px 56px; font-family: "DejaVu Sans", sans-serif;
  border-bottom: 14px solid #3f51b5; }}
.name {{ display: flex; align-items: center; gap: 22px; font-size: 62px; font-weight: bold; }}
.name img {{ width: 72px; }}
.words {{ align-self: center; }}
p {{ font-size: 38px; line-height: 1.3; margin: 34px 0 0; }}
.picture {{ align-self: center; justify-self: end; width: 410px; }}
pre {{ grid-column: 1 / 3; font: 22px/1.5 "DejaVu Sans Mono", monospace; color: #14602c;
  background: #e6f6ea; padding: 14px 22px; border-radius: 10px; margin: 0; }}
</style><div class="words"><div class="name"><img src="{logo}">mylib</div><p>{said}</p></div>
<img class="picture" src="{picture}"><pre>{lines}</pre>"""


def section(readme: str, name: str) -> str:
    found = re.search(rf"\[start:{name}\] -->(.*?)<!-- --8<-- \[end:{name}\]", readme, re.DOTALL)
    assert found, f"README has no section {name!r}"
    return found[1]


def page(readme: str) -> str:
    said = section(readme, "intro").split("\n\n", 1)[1]
    said = html.escape(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", said).strip())
    lines = re.findall(r"^\+ *(.*)$", section(readme, "diff"), re.MULTILINE)
    return _PAGE.format(
        said=re.sub(r"\*\*(.*?)\*\*", r"<b>\1</b>", said),
        lines=html.escape("\n".join(f"+ {line}" for line in lines)),
        logo=(ROOT / "docs" / "assets" / "logo.svg").as_uri(),
        picture=(ROOT / "docs" / "assets" / "placement-model.svg").as_uri(),
    )


def main() -> None:
    browser = chromium.find() or sys.exit("there is no Chromium here")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "card.html")
        file.write_text(page((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        chromium.run(browser, f"--screenshot={CARD}", size, "--hide-scrollbars", file.as_uri())
    print(f"{CARD}: {CARD.stat().st_size} bytes")


if __name__ == "__main__":
    main()
