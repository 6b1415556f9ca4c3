"""trio_router: a structured-concurrency router for disaggregated LLM inference.

The names below are the public interface for embedding; `trio_router.testing` runs whole clusters on virtual time, and
`trio_router.rpc` is gRPC on trio by itself.
"""

from .dispatch.router import Router, RouterSettings, open_router
from .dispatch.stream import Frame, GenerateStream
from .errors import RouterError
from .fleet.worker import WorkerRole, WorkerSpec
from .observe.hooks import Observer, Outcome, RequestRecord
from .protocol.messages import GenerateRequest, GenerateResponse, SamplingParams, TokenizedInput

__version__ = "0.1.0"

__all__ = [
    "Frame",
    "GenerateRequest",
    "GenerateResponse",
    "GenerateStream",
    "Observer",
    "Outcome",
    "RequestRecord",
    "Router",
    "RouterError",
    "RouterSettings",
    "SamplingParams",
    "TokenizedInput",
    "WorkerRole",
    "WorkerSpec",
    "__version__",
    "open_router",
]
