"""HTTP of a rollout server: health, metrics, completions of the current policy, administration.

    client --> ApiServer (uvicorn, in the server's event loop) --> app
                    |-- probes        /healthz /readyz
                    |-- metrics       /metrics
                    |-- completions   /v1/*            --> Writers --> Engine.stream
                    +-- admin         /admin/*         --> Admission (dispatcher)

The context:

- `ApiServer`   the socket, from before the engine starts until after it has ended
- `HttpContext`       what the routes share: how far the server is, and its nouns once they are there
- `ApiKeys`        who may do what
- `PromptEncoder`     request -> token ids
- `CompletionJobs`     completions under way for HTTP, so many at once and no more
- `TextStream`  token ids -> text, piece by piece

What waits for what: a request waits for its body (bounded), then for its pieces, which the engine unblocks;
a client that leaves, the request's deadline or the server's end cancels them. A client that reads slowly keeps
nobody waiting: the engine's stream is read by a task of its own.

Tokens made here are no training tokens: the engine counts what `stream` makes apart from what `generate` makes.
"""
