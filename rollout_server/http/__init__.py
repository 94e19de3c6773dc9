"""HTTP API of a rollout server: health, metrics, completions of the current policy, administration.

    client --> ApiServer (uvicorn, in the server's event loop) --> app
                    |-- probes        /healthz /readyz
                    |-- metrics       /metrics
                    |-- completions   /v1/*            --> CompletionJobs --> Engine.stream
                    +-- admin         /admin/*         --> AdmissionGate (dispatcher)

- `ApiServer`       the socket, from before the engine starts until after it has ended
- `HttpContext`     what the routes share: configuration, keys, and the server's parts once it is ready
- `ApiKeys`         the keys for completions and administration
- `PromptEncoder`   prompts of requests to token ids
- `CompletionJobs`  completions under way for HTTP, bounded in number
- `TextStream`      token ids to text, piece by piece

A request waits for its body (bounded), then for its chunks, which the engine unblocks. A client that leaves, the
request's deadline or the server's end cancels them. A client that reads slowly blocks nothing: a task reads the
engine's stream.

Tokens made here are no training tokens: the engine counts what `stream` makes apart from what `generate` makes.
"""
