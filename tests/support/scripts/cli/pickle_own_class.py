"""Script that pickles an object of a class that it defines."""

import inspect
import pickle
from dataclasses import dataclass
from typing import get_type_hints


@dataclass
class Sample:
    """One sample."""

    tokens: "list[int]"


copy = pickle.loads(pickle.dumps(Sample([1, 2])))
print(copy, type(copy) is Sample, get_type_hints(Sample))
print(inspect.getsource(Sample))
