"""Every Kubernetes key, environment variable, port and file name that two parts share, once.

Nothing else in the project spells one of these by hand.
"""

from motley_api import API_GROUP

# Labels on everything that the operator makes. Values fit 63 characters because names are bounded at admission.
RUN_LABEL = f"{API_GROUP}/run"  # RLRun name
GROUP_LABEL = f"{API_GROUP}/group"  # SamplerGroup name
ROLE_LABEL = f"{API_GROUP}/role"  # one of ROLES
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "motley"
GPU_TYPE_LABEL = (
    f"{API_GROUP}/gpu-type"  # on pods that hold GPUs: what they are priced as, also when their group is gone
)
CAPACITY_TYPE_LABEL = f"{API_GROUP}/capacity-type"
ROLE_SAMPLER, ROLE_ROUTER, ROLE_ROLLOUT, ROLE_TRAINER = "sampler", "router", "rollout", "trainer"
ROLES = (ROLE_SAMPLER, ROLE_ROUTER, ROLE_ROLLOUT, ROLE_TRAINER)

# Annotations.
SPEC_HASH_ANNOTATION = f"{API_GROUP}/spec-hash"  # hash of what a child was rendered from
START_ANNOTATION = f"{API_GROUP}/start"  # hashes of what pods read only at their start, by part of the spec
RENDERED_BY_ANNOTATION = (
    f"{API_GROUP}/rendered-by"  # hash of how this version of the operator renders pods, images included
)
STEPS_ANNOTATION = f"{API_GROUP}/steps"  # on the trainer's Job: spec.steps when it was made
REPLICAS_ANNOTATION = f"{API_GROUP}/replicas"  # on an inline SamplerGroup: the run's replicas as last written
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

FIELD_MANAGER = "motley-operator"
FINALIZER = f"{API_GROUP}/cleanup"
LEASE_NAME = "motley-operator"

# GPUs.
GPU_RESOURCE = "nvidia.com/gpu"

# Environment of every pod of a run. Paths a pod uses come from here or from its arguments, never from code.
ENV_RUN = "MOTLEY_RUN"  # RLRun name
ENV_RUN_UID = "MOTLEY_RUN_UID"
ENV_NAMESPACE = "MOTLEY_NAMESPACE"
ENV_TOKEN = "MOTLEY_TOKEN"  # from the run's Secret; "Authorization: Bearer <token>" between pods
ENV_RUN_CONFIG = "MOTLEY_RUN_CONFIG"  # path of run.json: RLRun.spec as JSON, defaults filled in
ENV_FLEET = "MOTLEY_FLEET"  # path of fleet.json: records.Fleet as JSON (router, trainer)
ENV_GROUP_CONFIG = "MOTLEY_GROUP_CONFIG"  # path of group.json: SamplerGroup.spec as JSON (samplers)
ENV_GROUP = "MOTLEY_GROUP"  # SamplerGroup name (samplers)
ENV_STORE_URL = "MOTLEY_STORE_URL"  # fsspec URL; a run's files lie under <url>/<run>/
ENV_ROUTER_URL = "MOTLEY_ROUTER_URL"
ENV_TRAINER_URL = "MOTLEY_TRAINER_URL"
ENV_POD_NAME = "MOTLEY_POD_NAME"  # fieldRef metadata.name; an engine's id
ENV_POD_IP = "MOTLEY_POD_IP"  # fieldRef status.podIP; servers bind and advertise this address
ENV_NODE_NAME = "MOTLEY_NODE_NAME"  # fieldRef spec.nodeName
ENV_SGLANG_PYTHON = "MOTLEY_SGLANG_PYTHON"  # interpreter that has sglang, where it is not the sampler's own
ENV_SCRATCH = "MOTLEY_SCRATCH"  # an emptyDir: pulled views, sandboxes

# A process that can never work as configured (no such model, no tasks) writes why to stderr, last, and exits with this code:
# sysexits' EX_CONFIG. The trainer's Job is then failed at once, and the text becomes a condition.
EXIT_CONFIG = 78
# A sampler whose engine failed, or failed its proof again and again, ends with this code, and "<reason>: <why>" as its last line.
EXIT_GAVE_UP = 3
# A pod of the training gang that left after a save because it, or another pod of the gang, was asked to: 128 + SIGTERM. No failure.
EXIT_STOPPED = 143

# Ports: one each, on the pod's own address; /health, /metrics and the role's API share it.
ROUTER_PORT = 8000
TRAINER_PORT = 8100  # the trajectory buffer beside rank 0
RENDEZVOUS_PORT = 8110  # torchrun's c10d store, pod 0 of the gang
SAMPLER_PORT = 8200  # the agent; it speaks SGLang's schema for the engine behind it
ENGINE_PORT = 8201  # an engine that runs as a process of its own behind the agent (SGLang)
ROLLOUT_PORT = 8300
OPERATOR_METRICS_PORT = 9090
OPERATOR_HEALTH_PORT = 9091

# Keys of the Secret and the ConfigMaps.
SECRET_TOKEN_KEY = "token"
RUN_CONFIG_KEY = "run.json"
FLEET_KEY = "fleet.json"
GROUP_CONFIG_KEY = "group.json"

# Headers.
MIN_VERSION_HEADER = "X-Motley-Min-Version"  # 409 when the engine serves less
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"  # affinity, as sglang-router and smg read it

# Weight views and their files under <store>/<run>/views/<view>/.
VIEW_BF16, VIEW_FP8, VIEW_NVFP4 = "bf16", "fp8", "nvfp4"
STANDARD_VIEWS = (VIEW_BF16, VIEW_FP8, VIEW_NVFP4)
VIEW_OF_PRECISION = {"BF16": VIEW_BF16, "FP8": VIEW_FP8, "NVFP4": VIEW_NVFP4}
LATEST_POINTER = "latest"


def version_dir(version: int) -> str:
    """Folder name of a weights version: 10 -> ``v000010``."""
    if version < 0:
        raise ValueError(f"version must be >= 0, got {version}")
    return f"v{version:06d}"
