"""The colours of the report, and what they stand for. Colour-blind safe (Okabe and Ito; or apart in lightness)."""

TONIGHT, PREVIOUS_NIGHT, PLAIN = "#0b4f8a", "#7fb2de", "#b4bcc6"
SIDE_COLOURS = {"user": "#0b4f8a", "item": "#c4560a"}
OTHER = "#8b95a1"

SOURCE_COLOURS = {
    "pool": "#cc79a7",
    "previous": "#0072b2",
    "prompt": "#e69f00",
    "output": "#009e73",
    "target": "#b4bcc6",
}
SOURCE_LABELS = {
    "pool": "pool",
    "previous": "own previous text",
    "prompt": "own prompt",
    "output": "own output",
    "target": "the model itself",
}
DARK_COLOURS = frozenset({"#0b4f8a", "#0072b2", "#009e73", "#c4560a", "#4a5561"})  # light text is readable on these

ROUTE_COLOURS = {
    "collaborative": "#0b4f8a",
    "attribute": "#7fb2de",
    "random": "#e69f00",
    "global": "#f0d58a",
    "none": "#d5dae0",
}
ROUTE_LABELS = {
    "collaborative": "collaborative group",
    "attribute": "attribute group",
    "random": "random group",
    "global": "one global pool",
    "none": "no pool",
}
VARIANT_COLOURS = {"none": OTHER, "plain": "#e69f00"}  # the run's own: TONIGHT
