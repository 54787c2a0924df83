"""The server's counters by α or budget, in the text format that Prometheus reads."""

from __future__ import annotations

from collections import defaultdict

# Clients choose α and budgets freely. Beyond this many values the others are counted together.
_MAX_SETTINGS = 64


class Metrics:
    def __init__(self) -> None:
        self.values: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.settings: set[tuple[str, str]] = set()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        for kind in {"alpha", "budget"} & set(labels):
            if (kind, labels[kind]) not in self.settings and len(self.settings) >= _MAX_SETTINGS:
                labels[kind] = "other"
            self.settings.add((kind, labels[kind]))
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
