"""Upload a folder to the Hugging Face hub as a model repository."""

import re
import sys
from pathlib import Path

from mezo_cli.errors import UserError, first_line, without_credentials
from mezo_cli.hub import hub_url, is_offline, is_reachable


def check_push(repo: str) -> str:
    """Check that a folder can be uploaded as `repo`, before it is made; return the token."""
    import huggingface_hub

    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        raise UserError(f"--push {repo}: give USER/NAME, the name of a model repository at {hub_url()}")
    if is_offline():
        raise UserError(f"--push {repo}: HF_HUB_OFFLINE is set")
    if (token := huggingface_hub.get_token()) is None:
        raise UserError(f"--push {repo}: no token for {hub_url()}: log in by `hf auth login`, or set HF_TOKEN")
    if not is_reachable():
        raise UserError(f"--push {repo}: {hub_url()} does not answer")
    return token


def push(folder: Path, repo: str, token: str, private: bool) -> str:
    """Create the repository if it is not there, upload the folder in one commit, and return its address."""
    import huggingface_hub
    from huggingface_hub.utils import HfHubHTTPError, disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = huggingface_hub.HfApi(endpoint=hub_url(), token=token)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by mezo export")
    except Exception as error:  # huggingface_hub's, its HTTP library's, hf_xet's
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        reason = "the token may not write there" if status in (401, 403) else first_line(error)
        what = f"{reason}; {folder} is complete, only the upload failed"
        raise UserError(f"--push {repo}: {hub_url()}: {what}") from error
    return without_credentials(f"{hub_url()}/{repo}")
