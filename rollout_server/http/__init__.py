"""HTTP API of a rollout server: health, metrics, completions of the current policy, administration.

    client --> ApiServer (uvicorn, in the server's event loop) --> app
                    |-- probes        /healthz /readyz
                    |-- metrics       /metrics
                    |-- completions   /v1/*            --> CompletionJobs --> Engine.stream
                    +-- admin         /admin/*         --> AdmissionGate (dispatcher)

- `ApiServer`       the socket, from before the engine starts until after it has ended
- `HttpContext`     shared state of the routes: configuration, keys, and the server's parts once it is ready
- `ApiKeys`         keys for completions and administration
- `PromptEncoder`   encodes and checks prompts
- `CompletionJobs`  running completions, bounded in number
- `TextStream`      decodes token ids incrementally

A request waits for its body (bounded), then for its chunks, which the engine unblocks. It is cancelled if the client
disconnects, its deadline passes, or the server ends. A slow client blocks nothing: a task reads the engine's stream.

Tokens of these completions are not training tokens: the engine counts tokens of `stream` and `generate` separately.
"""
