"""A picture: bandwidth over run size, a line per engine, the ceiling, a panel per direction. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw", "draw_beside", "require_figure", "size_text"]

_TITLES = {"store": "store: device to host", "load": "load: host to device"}


def size_text(nbytes: int) -> str:
    """Bytes in the largest unit that leaves a whole number."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def require_figure() -> Any:
    """Matplotlib's class of figures, which needs no display.

    Raises
    ------
    ValueError
        matplotlib cannot be imported.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"a plot needs matplotlib, which cannot be imported: {error}") from None
    return Figure


def draw(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report of `kvraw.bench.report.run`.

    Raises
    ------
    ValueError
        matplotlib cannot be imported, or does not know the file's suffix.
    """
    Figure = require_figure()  # noqa: N806
    rows, machine = report["runs"], report["machine"]
    host = machine["device"] is None
    figure = Figure(figsize=(11, 4.6), dpi=100, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    labels = list(dict.fromkeys(row["engine"] for row in rows))
    for panel, (direction, title) in zip(panels, _TITLES.items(), strict=True):
        ceiling = report["ceilings"][direction]
        panel.axhline(ceiling, color="0.4", linestyle="--", linewidth=1)
        panel.annotate(
            f"one {'memmove' if host else 'large copy by the copy engine'}, {ceiling:.1f} GB/s",
            (0.02, ceiling),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
            color="0.3",
        )
        for at, label in enumerate(labels):
            line = [
                (r["run_bytes"], r["gb_per_s"]) for r in rows if (r["engine"], r["direction"]) == (label, direction)
            ]
            # The planner's choice lies on the line of the engine that it takes: draw it wide and behind.
            style = (
                {"linewidth": 5, "alpha": 0.3, "zorder": 1} if label == "auto" else {"linewidth": 1.5, "marker": "o"}
            )
            panel.plot(*zip(*line, strict=True), label=label, color=f"C{at}", markersize=4, **style)
        sizes = sorted({r["run_bytes"] for r in rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [size_text(s) for s in sizes], rotation=45, ha="right", fontsize=8)
        panel.minorticks_off()
        panel.set_title("copies within host memory" if host and direction == "store" else title, fontsize=10)
        panel.set_xlabel("contiguous run")
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0, top=max(ceiling, *(r["gb_per_s"] for r in rows)) * 1.1)
    panels[0].set_ylabel("GB/s")
    panels[1].legend(fontsize=8, loc="lower right")
    mib = report["options"]["mib"]
    figure.suptitle(f"{machine['name']}: {mib:g} MiB per call, blocks in random order", fontsize=11)
    figure.savefig(path)


def draw_beside(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report of `kvraw bench --beside decode`: GB/s against what a decode step takes longer, a panel a way.

    Raises
    ------
    ValueError
        matplotlib cannot be imported, or does not know the file's suffix; or no row could be measured.
    """
    Figure = require_figure()  # noqa: N806
    rows = [row for row in report["rows"] if not row["error"]]
    if not rows:
        raise ValueError("there is no row to draw")
    ways = [way for way in ("store", "load", "both") if any(row["way"] == way for row in rows)]
    figure = Figure(figsize=(5 * len(ways) + 2, 5), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(ways), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys((row["door"], row["engine"]) for row in rows))
    styles = [{"marker": "o^sDvPX*"[at // 10 % 8], "color": f"C{at % 10}"} for at in range(len(names))]
    for panel, way in zip(panels, ways, strict=True):
        for (door, engine), style in zip(names, styles, strict=True):
            found = [r for r in rows if (r["door"], r["engine"], r["way"]) == (door, engine, way)]
            panel.scatter(
                [r["gb_per_s"] for r in found],
                [r["p50_percent"] for r in found],
                s=[12 + 12 * max(0, r["bytes"].bit_length() - 20) for r in found],
                alpha=0.7,
                **style,
            )
        # Percents near zero and those of hundreds on one axis.
        panel.set_yscale("symlog", linthresh=5)
        panel.set_yticks([0, 2, 4, 10, 50, 100, 500], ["0", "2", "4", "10", "50", "100", "500"])
        panel.minorticks_off()
        panel.axhline(0, color="0.4", linewidth=1)
        panel.set_ylim(-3, max(10, *(r["p50_percent"] for r in rows)) * 1.3)
        panel.set_xlim(0, max(r["gb_per_s"] for r in rows) * 1.05)
        title = {"both": "both at once, GB/s of the slower one"}.get(way, _TITLES.get(way, way))
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("GB/s")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("a decode step takes longer, %")
    for (door, engine), style in zip(names, styles, strict=True):
        label = door if engine == "kvraw" else f"{door}: {engine}"
        panels[-1].plot([], [], linestyle="none", markersize=6, label=label, **style)
    panels[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    decode = report["decode"]
    text = f"{report['machine']['name']}: beside a decode of {decode['model']}, batch {decode['batch']}, "
    figure.suptitle(f"{text}{decode['p50_milliseconds']:.2f} ms a step (larger marks: larger transfers)", fontsize=11)
    figure.savefig(path)
