"""Model catalogue, pull, verify, licences."""

from edgellama.store.catalogue import Entry
from edgellama.store.progress import OnProgress, Progress, silent
from edgellama.store.store import Store, StoredModel, default_model, is_offline

__all__ = ["Entry", "OnProgress", "Progress", "Store", "StoredModel", "default_model", "is_offline", "silent"]
