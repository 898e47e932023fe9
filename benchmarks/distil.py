"""Writes `tconv3d/api/measured.json`, from which `tconv3d.accelerate` predicts gains, from a benchmark's results.

tconv3d bench --dtype tf32 float16 bfloat16 --backward --json benchmarks/results/h200.json
python benchmarks/distil.py benchmarks/results/h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.api import gains
from tconv3d.tools.bench import results


def main(path: Path) -> None:
    measured = gains.distil(results.read(path).as_dict())
    if not measured["rows"]:
        raise SystemExit(f"{path} compares nothing with PyTorch")
    rows = ",\n".join(f"  {json.dumps(row)}" for row in measured.pop("rows"))
    head = json.dumps(measured)[1:-1]
    gains.MEASURED.write_text(f'{{{head}, "rows": [\n{rows}\n]}}\n')
    print(f"wrote {gains.MEASURED.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
