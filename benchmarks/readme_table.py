"""Writes the README's performance table from a file of benchmarks/gpu_check.py.

python benchmarks/readme_table.py benchmarks/results/h200-tf32.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- performance:begin (filled from benchmarks/results) -->", "<!-- performance:end -->"


def best(row: dict[str, Any], backward: bool) -> float:
    return min(v for k, v in row["torch"].items() if k.endswith("_backward") == backward)


def table(result: dict[str, Any], source: str) -> str:
    lines = [
        f"TF32, contiguous tensors, milliseconds on one {result['device']} (PyTorch {result['torch']}, CUDA "
        f"{result['cuda']}, commit {result['commit']}), medians with L2 flushed, both sides in one process. "
        "*PyTorch* is as it comes; *best* the fastest of as it comes, `cudnn.benchmark` and `channels_last_3d` "
        "inputs. The floor is the larger of moving every tensor once and the useful arithmetic, at ceilings "
        "measured in the same run.",
        "",
        "| layer | kernel | floor | ours | PyTorch | best | speed-up over best | backward | best backward |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        forward = best(row, False)
        lines.append(
            f"| {row['layer']} | {row['kernel']} | {row['floor_ms']:.3f} | {row['ms']:.3f} | "
            f"{row['torch']['default']:.3f} | {forward:.3f} | {forward / row['ms']:.2f} | "
            f"{row['backward_ms']:.2f} | {best(row, True):.2f} |"
        )
    # Measured again in another run after it was improved, and copied from what that run printed.
    host = result.get("host_later", result["host"])
    after = (
        f" (another, later run at commit {host['commit']}, copied from its printed output in "
        "[h200-tasks.txt](benchmarks/results/h200-tasks.txt); the table's own run read "
        f"{result['host']['ours_us']:.0f} / {result['host']['torch_us']:.0f} and "
        f"{result['host']['ours_grad_us']:.0f} / {result['host']['torch_grad_us']:.0f} before the improvement)"
        if "host_later" in result
        else ""
    )
    slower = [row["layer"] for row in result["rows"] if best(row, False) < row["ms"]]
    slower_backward = [row["layer"] for row in result["rows"] if best(row, True) < row["backward_ms"]]
    lines += [
        "",
        f"Slower than PyTorch's best today: forward {', '.join(slower) or 'none'}; backward "
        f"{', '.join(slower_backward) or 'none'}. Input gradients of strided layers do not run on tensor cores yet.",
        "",
        f"Host time of a repeated call, microseconds, ours / `nn.ConvTranspose3d`: {host['ours_us']:.0f} / "
        f"{host['torch_us']:.0f} without gradients, {host['ours_grad_us']:.0f} / "
        f"{host['torch_grad_us']:.0f} with{after}. "
        f"Data: [{source}]({source}); made by `{result['command']}`. One run each: differences of a few percent are "
        "noise, and single layers have read a third higher once (depthwise_64: 0.271 in three other runs).",
    ]
    return "\n".join(lines)


def main() -> None:
    source = Path(sys.argv[1]).resolve()
    readme = ROOT / "README.md"
    text = table(json.loads(source.read_text()), source.relative_to(ROOT).as_posix())
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    readme.write_text(pattern.sub(lambda _: f"{BEGIN}\n{text}\n{END}", readme.read_text()))


if __name__ == "__main__":
    main()
