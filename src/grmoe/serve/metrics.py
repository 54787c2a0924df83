"""The server's counters by α, in the text format that Prometheus reads."""

from __future__ import annotations

from collections import defaultdict

# Clients choose α freely. Beyond this many values the others are counted together.
_MAX_ALPHAS = 64


class Metrics:
    def __init__(self) -> None:
        self.values: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.alphas: set[str] = set()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        if "alpha" in labels and labels["alpha"] not in self.alphas:
            if len(self.alphas) >= _MAX_ALPHAS:
                labels["alpha"] = "other"
            self.alphas.add(labels["alpha"])
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        self.values[name, text] += amount

    def text(self, **gauges: float) -> str:
        lines = []
        for name, value in gauges.items():
            lines += [f"# TYPE grmoe_{name} gauge", f"grmoe_{name} {value:g}"]
        before = ""
        for (name, labels), amount in sorted(self.values.items()):
            if name != before:
                lines.append(f"# TYPE grmoe_{name} counter")
            lines.append(f"grmoe_{name}{{{labels}}} {amount:.10g}")
            before = name
        return "\n".join(lines) + "\n"
