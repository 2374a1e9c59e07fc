"""What a repository on a Hugging Face hub holds. The only module that needs huggingface_hub."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from hearth.errors import ConfigError, HearthError, MissingError, Unreachable
from hearth.fetch_types import Denied, Request, wanted
from hearth.weights import Manifest, WeightFile


def listing(request: Request) -> Manifest:
    """What the repository holds at this revision.

    Raises MissingError (no huggingface_hub, repository or revision), Denied, Unreachable, ConfigError.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingError(
            "hearth fetch needs huggingface_hub",
            "pip install 'hearth[fetch]', or fetch where it is installed",
        ) from None
    api = HfApi(endpoint=request.endpoint, token=request.token or False)
    try:
        info = api.model_info(request.repo, revision=request.revision, files_metadata=True, timeout=60)
    except Exception as error:
        raise _named(error, request) from error
    return _manifest(info, request)


def _named(error: Exception, request: Request) -> HearthError:
    """An error of the hub's library as ours. Its classes have moved between versions: they go by name."""
    names = {kind.__name__ for kind in type(error).__mro__}
    said = " ".join(str(error).split())[:200]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in names:
        return Denied(
            f"{request.repo}: the hub wants a token that may read it",
            "give --token-file, and accept its terms",
        )
    if "RevisionNotFoundError" in names:
        return MissingError(
            f"{request.repo}: no revision {request.revision}", "name a branch, a tag or a commit"
        )
    if "RepositoryNotFoundError" in names:
        return MissingError(
            f"{request.repo}: no such repository, or it is private", "check the name; give --token-file"
        )
    if status in (401, 403):
        return Denied(
            f"{request.repo}: the hub wants a token that may read it",
            "give --token-file, and accept its terms",
        )
    if names & {"HFValidationError", "HfUriError"}:
        return ConfigError(
            f"{request.repo}: not the name of a repository", "write it like nvidia/GLM-5-NVFP4"
        )
    return Unreachable(
        f"the hub doesn't answer: {said or type(error).__name__}", "check network, proxy and HF_ENDPOINT"
    )


def _manifest(info: Any, request: Request) -> Manifest:
    try:
        rows = [_file(sibling) for sibling in info.siblings or ()]
        return Manifest(
            repo=request.repo,
            revision=request.revision,
            commit=info.sha,
            fetched_at=datetime.now(UTC).isoformat(timespec="seconds"),
            files=tuple(row for row in rows if wanted(row.path, request)),
        )
    except (ValidationError, AttributeError, TypeError) as error:
        raise ConfigError(f"{request.repo}: the hub's list can't be used: {error}") from error


def _file(sibling: Any) -> WeightFile:
    lfs = sibling.lfs
    digest = "" if lfs is None else str(lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256)
    return WeightFile(
        path=sibling.rfilename,
        size=sibling.size,
        sha256=digest,
        blob="" if digest else str(sibling.blob_id or ""),
    )
