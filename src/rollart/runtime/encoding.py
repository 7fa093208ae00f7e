"""Objects as bytes between processes: pickle, with short ways for what travels by the thousand.

Owns how frozen dataclasses with slots, named tuples and flat arrays are taken apart and put together again; everything else
goes as pickle takes it. The standard library takes such dataclasses apart field by field, in Python, at three to five times
the cost. Invariants: what comes out equals what went in, class by class and field by field; an object that was in a message
twice is one object again (but for what a `Tokens` holds); an array can be written to if it could before, unless it is in a
`TokenPayload`, into which nobody writes. Objects are put together without their `__init__` and `__post_init__`, as pickle
does it: what those check was checked where the object was made. Bytes of a stranger must not be decoded: like pickle's, they
can name any function.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollart.core.types import Span, Tokens
from rollart.runtime.payload import FLOAT32, INT32, TokenPayload

Reduced = str | tuple[Any, ...]
"""As `object.__reduce__` returns it."""
Reducer = Callable[[Any], Reduced]
Builder = Callable[..., Any]

ARRAY, PIECE = "array", "piece"
"""Names of flat arrays and of `Tokens` with ids, beside the names of classes, which have a colon in them."""
SMALL_BYTES = 1 << 16
"""Arrays beyond it go pickle's way, which copies them less often."""
DTYPES: dict[str, np.dtype[Any]] = {np.dtype(char).char: np.dtype(char) for char in "?bBhHiIlLqQefd"}
"""Of numbers in the byte order of this machine: those whose bytes say everything."""


def encoded(value: object) -> bytes:
    """Raises whatever pickle raises for an object that cannot travel."""
    file = io.BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except RecursionError:
        # an object that holds itself: pickle makes it before what it holds, here it would be made after
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return file.getvalue()


def decoded(data: bytes | memoryview) -> Any:
    """What `encoded` was given. Raises whatever pickle raises for bytes that it did not make."""
    return pickle.loads(data)


def made(name: str, *values: Any) -> Any:
    """One object again, in the process that decodes: the name of its class, and the values of its fields."""
    return _BUILDERS[name](*values)


# --- which classes -------------------------------------------------------------------------------------------------------


def _named(name: str) -> Any:
    """The class of a `module:qualname`. Raises ImportError or AttributeError."""
    module, _, qualname = name.partition(":")
    return attrgetter(qualname)(import_module(module))


def _found(cls: type, name: str) -> bool:
    """Whether another process would find this very class under its name."""
    try:
        return _named(name) is cls
    except (ImportError, AttributeError, ValueError):
        return False


def _is_named_tuple(cls: type) -> bool:
    """As `NamedTuple` makes them, with nothing of their own in how they are pickled."""
    own = vars(cls)
    return (
        cls.__bases__ == (tuple,)
        and {"_fields", "_make", "_field_defaults", "__getnewargs__"} <= own.keys()
        and not _says_how(own)
        and {"__getstate__", "__setstate__"}.isdisjoint(own)
    )


def _is_plain(cls: type) -> bool:
    """A frozen dataclass with slots, as its bases are, that leaves making and pickling to the standard library."""
    return type(cls) is type and all(
        is_dataclass(one)
        and {field.name for field in fields(one)} == {name for base in one.__mro__ for name in _own_slots(base)}
        and all(
            getattr(vars(one).get(way), "__module__", "") == "dataclasses" for way in ("__getstate__", "__setstate__")
        )
        and not _says_how(vars(one))
        and "__new__" not in vars(one)
        for one in cls.__mro__[:-1]
    )


def _says_how(own: Iterable[str]) -> bool:
    return not {"__reduce__", "__reduce_ex__", "__getnewargs_ex__", "__init_subclass__"}.isdisjoint(own)


def _own_slots(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if isinstance(value, MemberDescriptorType)]


def _compiled(function: str, source: str, **names: object) -> Callable[..., Any]:
    """A function written for one class: its fields are few and known, and a loop over them costs more than they do."""
    exec(source, names)
    compiled: Callable[..., Any] = names[function]  # type: ignore[assignment]
    return compiled


# --- taking apart --------------------------------------------------------------------------------------------------------


class _Reducers(dict[type, Reducer]):
    """How an object of a class is taken apart, worked out when the first one comes."""

    def __missing__(self, cls: type) -> Reducer:
        if issubclass(cls, type):
            raise KeyError(cls)  # a class of such a class goes by its name
        reducer = self[cls] = copyreg.dispatch_table.get(cls) or _reducer(cls)
        return reducer


def _reducer(cls: type) -> Reducer:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if not _found(cls, name):
        return _standard
    if _is_named_tuple(cls):
        return lambda value: (made, (name, *value))
    if _is_plain(cls) and _can_be_built(cls):
        values = ", ".join(f"value.{field.name}" for field in fields(cls))
        return _compiled("reduce", f"def reduce(value): return made, (name, {values})", name=name, made=made)
    return _standard


def _can_be_built(cls: type) -> bool:
    """Whether `builder` can, which must be known where objects of the class are taken apart."""
    try:
        builder(cls)(*[None] * len(fields(cls)))
    except TypeError:
        return False  # its objects are laid out otherwise, with room for weak references, say
    return True


def _standard(value: Any) -> Reduced:
    reduced: Reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return reduced


def _array(value: NDArray[Any]) -> Reduced:
    dtype = value.dtype
    if value.ndim != 1 or value.nbytes > SMALL_BYTES or DTYPES.get(dtype.char) is not dtype:
        return _standard(value)
    data = value.tobytes()
    return made, (ARRAY, bytearray(data) if value.flags.writeable else data, dtype.char)


def _piece(value: Tokens) -> Reduced:
    """A piece with its spans, payload and arrays at once: most of what travels is made of these."""
    payload, spans = value.payload, value.spans
    if type(payload) is not TokenPayload or type(spans) is not tuple:
        return _REDUCE_TOKENS(value)
    ids, logprobs, kept = payload.ids, payload.logprobs, payload.log_kept_mass
    if not (
        _fits(ids, INT32)
        and (logprobs is None or _fits(logprobs, FLOAT32))
        and (kept is None or _fits(kept, FLOAT32))
        and all([type(span) is Span for span in spans])
    ):
        return _REDUCE_TOKENS(value)
    return made, (
        PIECE,
        value.n_tokens,
        tuple([(span.version, span.n_tokens) for span in spans]) if spans else (),
        ids.tobytes(),
        None if logprobs is None else logprobs.tobytes(),
        None if kept is None else kept.tobytes(),
    )


def _fits(array: object, dtype: np.dtype[Any]) -> bool:
    return type(array) is np.ndarray and array.dtype == dtype and array.ndim == 1


class _Pickler(pickle.Pickler):
    dispatch_table = _Reducers({np.ndarray: _array, Tokens: _piece})


# --- putting together ----------------------------------------------------------------------------------------------------


class _Builders(dict[str, Builder]):
    """What makes an object of the class of a name, worked out when the first one comes."""

    def __missing__(self, name: str) -> Builder:
        cls: type = _named(name)
        found = self[name] = cls if issubclass(cls, tuple) else builder(cls)
        return found


def builder(cls: type, first: Sequence[str] = ()) -> Builder:
    """A function of the values of all fields of a frozen dataclass with slots: those named first, then the others in order.

    An object is filled as one of a class that has the same slots and lets them be set, and then becomes one of its own:
    setting the slots of a frozen class costs a search for each of them.
    """
    names = [*first, *(field.name for field in fields(cls) if field.name not in first)]
    open_class = type(
        cls.__name__,
        cls.__bases__,
        {
            "__slots__": tuple(_own_slots(cls)),
            "__module__": __name__,
            "__setattr__": object.__setattr__,
            "__delattr__": object.__delattr__,
        },
    )
    # numbered, as a field may be called what is used here
    lines = (
        f"def build({', '.join(f'value_{n}' for n in range(len(names)))}):",
        "  value = new(open_class)",
        *(f"  value.{name} = value_{n}" for n, name in enumerate(names)),
        "  value.__class__ = cls",
        "  return value",
    )
    return _compiled("build", "\n".join(lines), new=object.__new__, open_class=open_class, cls=cls)


_REDUCE_TOKENS = _reducer(Tokens)
_span, _tokens, _payload = builder(Span), builder(Tokens), builder(TokenPayload)


def _whole_piece(
    n_tokens: int, spans: tuple[tuple[int, int], ...], ids: bytes, logprobs: bytes | None, kept: bytes | None
) -> Tokens:
    payload = _payload(
        np.frombuffer(ids, INT32),
        None if logprobs is None else np.frombuffer(logprobs, FLOAT32),
        None if kept is None else np.frombuffer(kept, FLOAT32),
    )
    whole: Tokens = _tokens(n_tokens, tuple([_span(version, n) for version, n in spans]) if spans else (), payload)
    return whole


def _flat_array(data: bytes | bytearray, char: str) -> NDArray[Any]:
    return np.frombuffer(data, DTYPES[char])


_BUILDERS = _Builders({ARRAY: _flat_array, PIECE: _whole_piece})
