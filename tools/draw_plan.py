"""The picture on docs/plan.md: `python tools/draw_plan.py` writes docs/assets/plan.svg, which is
the first picture of a plan in examples/plan.ipynb, with colours of its own.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "assets" / "plan.svg"

# A background of its own: the picture is legible whatever the page's colours are. The names of dots
# lie over lines.
_STYLE = """
svg{font:11px system-ui,sans-serif;color:#222;background:#fff}
.label{fill:currentColor;paint-order:stroke;stroke:#fff;stroke-width:3px}
@media (prefers-color-scheme:dark){svg{color:#e4e4e8;background:#1e2129}.label{stroke:#1e2129}}
"""


def draw() -> str:
    notebook = json.loads((ROOT / "examples" / "plan.ipynb").read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    shown = "".join("".join(output.get("data", {}).get("text/html", ())) for output in outputs)
    pictures = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    picture = next(picture for picture in pictures if "<circle" in picture)
    head, rest = picture.split(">", 1)
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{head}><style>{_STYLE}</style>{rest}\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
