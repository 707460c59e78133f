"""Exceptions of this package.

WeightsError
 +- CodecError                   a tensor cannot be encoded or decoded (also a ValueError)
 |   +- NonFiniteWeightsError    NaN or infinity in a tensor that was to be published
 +- NamesError                   a tensor name or shape that does not fit the model (also a ValueError)
 +- UnsupportedModelError        an architecture this package has no mapping for (also a ValueError)
 +- CheckpointError              a folder that is not a readable Hugging Face checkpoint (also a ValueError)
 +- StoreError                   the store cannot do what was asked
     +- VersionRefusedError      a version that would move a pointer backwards, or is not complete
     +- VersionNotFoundError     no such version, or it is not complete yet
     +- ViewCorruptError         bytes that do not match their checksums, or belong to another model, view or version
"""


class WeightsError(Exception):
    """Base of everything that this package raises on purpose."""


class CodecError(WeightsError, ValueError):
    """A tensor cannot be encoded or decoded."""


class NonFiniteWeightsError(CodecError):
    """NaN or infinity in a tensor that was to be published."""


class NamesError(WeightsError, ValueError):
    """A tensor name or shape that does not fit the model."""


class UnsupportedModelError(WeightsError, ValueError):
    """An architecture that there is no names mapping for."""


class CheckpointError(WeightsError, ValueError):
    """A folder that is not a readable Hugging Face checkpoint."""


class StoreError(WeightsError):
    """The store cannot do what was asked."""


class VersionRefusedError(StoreError):
    """A version that would move a pointer backwards, or is not complete in every view."""


class VersionNotFoundError(StoreError):
    """No such version in the store, or it is not complete yet."""


class ViewCorruptError(StoreError):
    """Bytes that do not match their checksums, or that belong to another model, view or version."""
