"""The contract between Motley's parts: resources, keys and the records on the wire.

Imports pydantic, msgspec and the standard library only, so that every image can carry it.
"""

API_GROUP = "motley.dev"
API_VERSION = "v1alpha1"
GROUP_VERSION = f"{API_GROUP}/{API_VERSION}"
