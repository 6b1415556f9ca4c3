"""The reference worker: the engine's gRPC service over a simulated engine whose KV state is real.

Nothing here knows the router. `worker.open_worker` is the way in; everything below it is either a plain value
(blocks, ledger, language, sampling, handoff, sequence, core) or one of the few modules that wait (scheduler,
transfer, servicer).
"""
