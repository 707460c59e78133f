from motley_local.testing import full_namespace

__all__ = ["full_namespace"]
