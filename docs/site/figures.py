"""Draws docs/images/side-by-side.svg from the first table of benchmarks/side_by_side.md.

`python docs/site/figures.py` writes it; a test compares. The colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "side_by_side.md"
FIGURE = ROOT / "docs" / "images" / "side-by-side.svg"
NAMES = {
    "torch": "plain PyTorch",
    "deepspeed-cpu": "DeepSpeed, host memory",
    "deepspeed-nvme": "DeepSpeed, NVMe",
    "offloadzero-host": "offloadzero, host memory",
    "offloadzero-nvme": "offloadzero, NVMe",
}
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 }
  .note { font-size: 11px; fill: #59636e }
  .other { fill: #a3acb8 }
  .ours { fill: #3f51b5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .note { fill: #9198a1 }
    .other { fill: #6e7681 }
    .ours { fill: #8c9eff }
  }
"""
NOTE = (
    "A GPT of 152M parameters, 4 x 256 tokens per step, AdamW, clipping 1.0; the CPU is the device (2 cores, "
    "no GPU)."
)
ROW_HEIGHT, BAR_HEIGHT, TOP = 28, 18, 46
LABEL_WIDTH, BAR_WIDTH, PANEL_WIDTH = 178, 200, 286


def measured(text: str) -> dict[str, tuple[float, float]]:
    """Return seconds per step and GiB of peak memory by contender, from the table below "With clipping"."""
    section = text.split("## With clipping\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in section.splitlines()]
    return {row[1]: (float(row[2]), float(row[6])) for row in rows if len(row) > 6 and row[1] in NAMES}


def draw(values: dict[str, tuple[float, float]]) -> str:
    """Return the SVG: a row for each contender, with a bar of seconds and one of bytes."""
    width = LABEL_WIDTH + 2 * PANEL_WIDTH
    height = TOP + ROW_HEIGHT * len(NAMES) + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Seconds per step and peak memory of five contenders">',
        f"<style>{STYLE}</style>",
    ]
    for panel, (title, unit) in enumerate((("Seconds per step", "s"), ("Peak memory of the process", "GiB"))):
        left = LABEL_WIDTH + panel * PANEL_WIDTH
        largest = max(pair[panel] for pair in values.values())
        lines.append(f'<text class="title" x="{left}" y="24">{title}</text>')
        for row, (contender, pair) in enumerate(values.items()):
            y = TOP + row * ROW_HEIGHT
            length = round(pair[panel] / largest * BAR_WIDTH)
            kind = "ours" if contender.startswith("offloadzero") else "other"
            lines.append(
                f'<rect class="{kind}" x="{left}" y="{y}" width="{length}" height="{BAR_HEIGHT}" rx="2"/>'
            )
            lines.append(f'<text x="{left + length + 6}" y="{y + 14}">{pair[panel]:.2f} {unit}</text>')
    for row, contender in enumerate(values):
        lines.append(f'<text x="0" y="{TOP + row * ROW_HEIGHT + 14}">{NAMES[contender]}</text>')
    lines += [f'<text class="note" x="0" y="{height - 8}">{NOTE}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    missing = NAMES.keys() - (values := measured(TABLE.read_text())).keys()
    assert not missing, f"no row of {missing} in {TABLE}"
    FIGURE.write_text(draw(values))
