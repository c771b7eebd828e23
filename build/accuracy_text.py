"""The text that precisions are compared on, and how far from f32 one may be on it.

Imports nothing: the command line reads it at its start.
"""

from __future__ import annotations

KL_BOUND_NATS = 0.1
"""Mean KL divergence beyond which lint warns, and `--tune-precision` doesn't choose a precision."""

PASSAGES: tuple[str, ...] = (
    "A bridge carries its own weight before it carries anything else. Engineers therefore begin with the dead load, "
    "the steel and the concrete, and only then ask what lorries, wind and snow will add. A long span is mostly busy "
    "with holding itself up.",
    "Please write a short letter to my neighbour. Tell her that the parcel arrived on Tuesday, that it is dry and "
    "safe in the hall, and that she may fetch it whenever she likes. Thank her for watering the tomatoes.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    if not values:\n"
    "        raise ValueError('no values')\n    return total / len(values)\n",
    "Question: A train leaves at 9:40 and needs 2 hours and 35 minutes. When does it arrive?\nAnswer: Two hours after "
    "9:40 it is 11:40, and 35 minutes later it is 12:15. The train arrives at 12:15.",
    "The old lighthouse keeper had counted ships for forty years. He wrote each name into a blue book, with the hour "
    "and the weather, and when the book was full he began another. Nobody had ever asked him to read from them.",
    "To make the dough, mix 500 g of flour with 10 g of salt, add 320 ml of warm water and a spoonful of yeast, and "
    "knead for ten minutes. Let it rest under a cloth until it has doubled, then shape it into two loaves.",
    "Water expands when it freezes, which is why ice floats and why pipes burst in winter. Most other substances "
    "shrink as they become solid. The reason lies in the open lattice that its molecules form.",
    '{"order": 1187, "customer": "Lind", "items": [{"name": "lamp", "count": 2, "price": 34.5}, {"name": "cable", '
    '"count": 1, "price": 8.0}], "paid": true}',
)
"""A few hundred tokens of several kinds, always the same."""
