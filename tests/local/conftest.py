from motley_local.testing import full_namespace, local_cluster, pods_namespace

__all__ = ["full_namespace", "local_cluster", "pods_namespace"]
