"""Models and data sets of a hub by their ids: Hugging Face (huggingface_hub) or ModelScope (modelscope_hub).

    OWNER/NAME[@REVISION] --pinned--> OWNER/NAME@COMMIT --folder--> its files in the hub's cache, or None
                                                        --fetch---> the same, downloaded

    repo          ids, and what a repository can be asked for; the same for every hub
    base          the interface of a hub's client
    huggingface   its client; another hub is another module like this one
    modelscope
    cache         what this package remembers of a hub, and whether a cached snapshot is complete

The hub's own client downloads: it resumes, locks what another process is downloading, and finds mirrors, caches and
tokens by its variables (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE; MODELSCOPE_ENDPOINT, MODELSCOPE_CACHE,
MODELSCOPE_API_TOKEN). Files in the cache are not requested again. No pickled file is fetched.
"""

from async_grpo.models.hub.base import TOKENIZER_FILES
from async_grpo.models.hub.cache import cache_dir
from async_grpo.models.hub.repo import HubRepo, hub_repo, model_repo, settings_folder

__all__ = ["TOKENIZER_FILES", "HubRepo", "cache_dir", "hub_repo", "model_repo", "settings_folder"]
