"""The curves of a run (loss, learning rate, metrics) as a figure."""

from pathlib import Path

CURVES = "curves.png"
# values that an evaluation logs besides its scores
TIMES = ("runtime", "samples_per_second", "steps_per_second")
WIDTH, HEIGHT, DPI = 5, 3, 100  # inches of a panel; pixels of an inch


def panels(history: list[dict]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return {panel: {curve: [(update, value), ...]}} of `history`, the log of `Trainer`.

    Panels are the loss, the learning rate, and each of the task's metrics. Curves are "training"
    and "validation".
    """
    curves = {}
    for record in history:
        for name, value in record.items():
            panel, curve = (
                (name.removeprefix("eval_"), "validation")
                if name.startswith("eval_")
                else (name, "training")
            )
            is_plotted = (
                panel not in TIMES if curve == "validation" else panel in ("loss", "learning_rate")
            )
            if is_plotted and isinstance(value, int | float):
                curves.setdefault(panel, {}).setdefault(curve, []).append((record["step"], value))
    return {
        name: curves[name]
        for name in sorted(curves, key=lambda name: (name != "loss", name != "learning_rate"))
    }


def draw_curves(history: list[dict], path: Path) -> bool:
    """Draw `panels(history)` to the image file `path`. Return False, without a file, if there are
    none."""
    from matplotlib.figure import Figure  # 0.3 s, which a run that is only planned does not need

    drawn = panels(history)
    if not drawn:
        return False
    width = WIDTH * len(drawn)
    # No pyplot, which would keep the figure alive. A layout takes as long as the drawing.
    figure = Figure(figsize=(width, HEIGHT))
    figure.subplots_adjust(0.7 / width, 0.17, 1 - 0.1 / width, 0.88, wspace=0.2)
    for axes, (name, curves) in zip(
        figure.subplots(1, len(drawn), squeeze=False).flat, drawn.items(), strict=True
    ):
        for curve, points in curves.items():
            axes.plot(
                *zip(*points, strict=True), label=curve, marker="." if len(points) < 50 else None
            )
        axes.set(title=name.replace("_", " "), xlabel="updates")
        axes.legend()
    figure.savefig(path, dpi=DPI)
    return True
