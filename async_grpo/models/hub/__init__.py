"""Models and data sets on Hugging Face (huggingface_hub) or ModelScope (modelscope_hub), by id.

    OWNER/NAME[@REVISION] --pin_revision--> OWNER/NAME@COMMIT --find_folder--> its files in the hub's cache, or None
                                                              --fetch_files--> the same, downloaded if needed

    repo          HubRepo: parses ids, finds and downloads files; the same for every hub
    base          HubClient: the interface of a hub's client
    huggingface   client of Hugging Face; another hub is another module like this one
    modelscope    client of ModelScope
    cache         local records of the hub's answers; checks cached snapshots

The hub's library downloads: it resumes, locks files that another process is downloading, and reads mirrors, caches and
tokens from its variables (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE; MODELSCOPE_ENDPOINT, MODELSCOPE_CACHE,
MODELSCOPE_API_TOKEN). Cached files are not requested again. Pickled files are never fetched.
"""

from async_grpo.models.hub.base import TOKENIZER_FILES
from async_grpo.models.hub.cache import cache_dir
from async_grpo.models.hub.repo import HubRepo, hub_repo, model_repo, settings_folder

__all__ = ["TOKENIZER_FILES", "HubRepo", "cache_dir", "hub_repo", "model_repo", "settings_folder"]
