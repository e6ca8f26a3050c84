"""Where another engine gave more tokens per second than mtpserve, each in one sentence.

    python benchmarks/peers/losses.py RESULT.json --reasons REASONS.json    writes the sentences of a result anew, with reasons

mtpserve is compared with each other engine in the same mode, and with drafts also with engines that run without: drafting is a choice. Of
an engine's variants the fastest counts. A reason is what a sentence has after "because"; its key is ENGINE/MODE/REQUESTS, as
`vllm/mtp/64`, where MODE is `plain`, `mtp`, or `plain:mtp` for another engine without drafts against mtpserve with them. With the model
before it, `258m/vllm/mtp/64`, a reason is of that model alone. A result names the keys under `losses`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.peers_table import NAMES, worded
from peers.figures import OWN

# Theirs, mtpserve's → the key's.
COMPARED = {("plain", "plain"): "plain", ("mtp", "mtp"): "mtp", ("plain", "mtp"): "plain:mtp"}
DRAFTS = {"plain": "without drafts", "mtp": "with drafts"}


def reasons_in(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"--reasons {path}: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(f"--reasons {path}: is not valid JSON: {error}") from None
    if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
        raise SystemExit(f'--reasons {path}: must be an object of texts, like {{"vllm/mtp/64": "its step is one call"}}')
    return read


def losses(medians: list[dict[str, Any]], reasons: dict[str, str]) -> list[dict[str, Any]]:
    """`medians`: as figures.medians gives them → for each cell that was lost its key, both engines' numbers and the sentence."""
    out = []
    own = [row for row in medians if row["server"] == OWN]
    for mine in own:
        same = [row for row in medians if (row["model"], row["concurrency"]) == (mine["model"], mine["concurrency"])]
        for engine in dict.fromkeys(row["engine"] for row in same if row["server"] != OWN):
            for (theirs, ours), mode in COMPARED.items():
                rows = [row for row in same if row["engine"] == engine and row["mode"] == theirs]
                if ours != mine["mode"] or not rows:
                    continue
                best = max(rows, key=lambda row: row["tokens_per_s"])
                if best["tokens_per_s"] > mine["tokens_per_s"]:
                    out.append(lost(mine, best, f"{engine}/{mode}/{mine['concurrency']}", reasons))
    return out


def lost(mine: dict[str, Any], best: dict[str, Any], key: str, reasons: dict[str, str]) -> dict[str, Any]:
    whole = f"{mine['model']}/{key}"
    reason = reasons.get(whole, reasons.get(key))
    within = best["least_tokens_per_s"] <= mine["most_tokens_per_s"]
    many = mine["concurrency"]
    sentence = (
        f"At {many} {'request' if many == 1 else 'requests'} with {worded(mine['model'])}, {NAMES.get(best['engine'], best['engine'])} "
        f"{DRAFTS[best['mode']]} gives {best['tokens_per_s'] / mine['tokens_per_s']:.2f} × mtpserve's tokens per second "
        f"{DRAFTS[mine['mode']]} ({best['tokens_per_s']:.1f} against {mine['tokens_per_s']:.1f}"
        f"{'; the ranges of the rounds overlap' if within else ''})"
    )
    numbers = {"theirs": best["tokens_per_s"], "mtpserve": mine["tokens_per_s"], "ranges_overlap": within}
    of = {"key": whole, "server": best["server"], **numbers, "reason": reason}
    return of | {"sentence": sentence + (f", because {reason.strip().rstrip('.')}." if reason else ".")}


def unused(found: list[dict[str, Any]], reasons: dict[str, str]) -> list[str]:
    """Keys of reasons for cells that were not lost."""
    used = {key for each in found for key in (each["key"], each["key"].split("/", 1)[1])}
    return sorted(set(reasons) - used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a result of peers/cpu.py; rewritten")
    parser.add_argument("--reasons", type=Path, metavar="FILE", help="JSON: reasons by key")
    args = parser.parse_args()
    try:
        whole = json.loads(args.result.read_text(encoding="utf-8"))
        medians = whole["numbers"]["medians"]
        if not all("engine" in row for row in medians):
            raise KeyError("engine")
    except OSError as error:
        raise SystemExit(f"{args.result}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"{args.result}: is not a result of peers/cpu.py, or one of before it named engines") from None
    reasons = reasons_in(args.reasons)
    whole["numbers"]["losses"] = found = losses(medians, reasons)
    args.result.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    show(found, reasons)


def show(found: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    print("\n".join(each["sentence"] for each in found) if found else "mtpserve gave the most tokens per second in every cell")
    if without := [each["key"] for each in found if each["reason"] is None]:
        print(f"without a reason: {', '.join(without)}")
    if left := unused(found, reasons):
        print(f"reasons for cells that were not lost: {', '.join(left)}")


if __name__ == "__main__":
    main()
