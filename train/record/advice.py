"""What to do about where the time of a run went, in words. Pure."""

from __future__ import annotations

from typing import Any

from train.record.times import PARTS, Account

_WORTH_A_WORD = {
    "communication": 0.3, "data": 0.3, "checkpoints": 0.1, "evaluation": 0.25, "start": 0.3, "lost": 0.1,
}  # fmt: skip
"""Shares of the time in which a run was wanted from which a part is worth a word."""
_SHORT = 60.0
"""Seconds; the start of a run that is shorter says nothing."""


def verdict(account: Account, record: dict[str, Any]) -> list[str]:
    """Sentences: how much was computing, and of what else was much, what helps."""
    wanted = account.whole - account.parts["idle"]
    if account.whole <= 0 or wanted <= 0:
        return []
    if account.parts["unknown"] > 0.5 * wanted:
        return [f"{account.parts['unknown'] / wanted:.0%} of its time cannot be told apart"]
    share = {part: seconds / wanted for part, seconds in account.parts.items()}
    others = {part: value for part, value in share.items() if part not in ("compute", "idle")}
    largest = max(others, key=others.__getitem__)
    rest = f"; most of the rest: {PARTS[largest][0]}, {others[largest]:.0%}" if others[largest] >= 0.01 else ""
    but = " of the time in which it was wanted" if account.parts["idle"] > 0.01 * account.whole else ""
    said = [f"{share['compute']:.0%}{but} was computing{rest}"]
    for part, least in _WORTH_A_WORD.items():
        if share[part] > least and not (part == "start" and account.whole < _SHORT):
            said.append(f"{PARTS[part][0]}: {_remedy(part, record)}")
    return said


def _remedy(part: str, record: dict[str, Any]) -> str:
    if part == "data" and record.get("data_wait"):
        return str(record["data_wait"])
    return {
        "communication": "give each rank more to compute (a larger batch_size, fewer ranks), and see what the links "
        "give: train doctor --job, train bench collective; a rank that is slower than the others counts here, too",
        "data": "raise data.workers, or make samples cheaper to read: train bench input",
        "checkpoints": "save less often (--checkpoint.every_minutes), keep --checkpoint.asynchronous true, or write to "
        "a faster disk: train doctor --only 'write speed'",
        "evaluation": "evaluate less often (--eval.every_epochs) or less (--eval.limit_batches)",
        "start": "a keeper holds what a start imports ready (train keeper); a data set that lists its files for long "
        "may keep the list",
        "lost": "see why the attempts died; --checkpoint.every_minutes says how much a death can cost",
    }[part]
