"""Where an Optuna study lives: in memory, in a journal file on one host, or in a database for many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kgen.errors import ConfigError

_JOURNAL = "journal:"


def import_optuna() -> Any:
    """The optuna module, quiet; ConfigError with the command that installs it."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("Searching this space needs Optuna: pip install 'kgen[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def journal_path(url: str | None) -> Path | None:
    """The file of `journal:PATH`, else None."""
    return Path(url.removeprefix(_JOURNAL)) if url is not None and url.startswith(_JOURNAL) else None


def check_storage(url: str | None, served: str | None = None) -> None:
    """Refuse a storage that is known to fail; `served` is what stands behind a gRPC proxy, where that is known.

    ConfigError for an unknown form, and for a gRPC proxy before a journal file: workers die on it (optuna#6084).
    """
    if url is None:
        return
    scheme, colon, rest = url.partition(":")
    parts = scheme.split("+")
    behind = (served or "").partition(":")[0]
    if "grpc" in parts and ("journal" in parts or behind == "journal"):
        raise ConfigError(
            "A gRPC proxy before a journal file kills its workers (optuna#6084): put PostgreSQL behind the proxy, "
            "or use the journal directly on one host."
        )
    if not colon or not rest or parts[0] not in ("journal", "grpc", "postgresql", "mysql", "sqlite"):
        raise ConfigError(
            f"{_without_password(url)!r} is no study storage: use journal:FILE, postgresql://… or grpc://HOST:PORT."
        )


def open_storage(url: str | None) -> Any:
    """The Optuna storage of a URL; None is in memory. ConfigError when it is refused or its package is missing."""
    check_storage(url)
    optuna = import_optuna()
    path = journal_path(url)
    if url is None:
        return optuna.storages.InMemoryStorage()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = optuna.storages.journal
        # the default lock makes symbolic links, which fail on some file systems (optuna#6277)
        lock = journal.JournalFileOpenLock(str(path))
        return optuna.storages.JournalStorage(journal.JournalFileBackend(str(path), lock_obj=lock))
    try:
        if url.startswith("grpc://"):
            host, _, port = url.removeprefix("grpc://").partition(":")
            return optuna.storages.GrpcStorageProxy(host=host, port=int(port or 13000))
        return optuna.storages.RDBStorage(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"The study storage {_without_password(url)} cannot be used: {error}.") from None


def quarantine_journal(url: str | None) -> Path | None:
    """Rename the journal file of a URL to the first free `<name>.corrupt-N`; gives that path, None for other
    storages.
    """
    path = journal_path(url)
    if path is None or not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    path.rename(target)
    return target


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url
