from motley_local.testing import api_server, control_plane, full_namespace, namespace  # noqa: F401
