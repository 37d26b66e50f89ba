from typing import Any, Final

import numpy as np
import numpy.typing as npt

DTYPES: Final[dict[int, str]]

def kind(x: list[Any] | tuple[Any, ...]) -> str | None: ...
def to_ndarray(x: list[Any] | tuple[Any, ...]) -> npt.NDArray[np.generic] | None: ...
