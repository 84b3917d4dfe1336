"""Growth of a time with a size."""

from dataclasses import dataclass, field

import numpy as np
from scipy.stats import linregress


@dataclass
class Curve:
    """Times of one side, host in microseconds or device in milliseconds, by the size that grows."""

    grows: str
    side: str
    points: dict[int, float] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        sizes, times = np.array(list(self.points.items())).T
        x, y = np.log(sizes), np.log(times)
        return {
            "grows": self.grows,
            "side": self.side,
            "from": int(sizes[0]),
            "to": int(sizes[-1]),
            "first": float(times[0]),
            "last": float(times[-1]),
            "exponent": float(linregress(x, y).slope),
            "at the end": float((y[-1] - y[-2]) / (x[-1] - x[-2])),
        }
