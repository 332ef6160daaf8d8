"""Settings of a process: argument > environment (``WADILOCO_<SERVICE>_…``) > file (TOML) > default.

Each service declares one frozen model; its field docstrings are the help texts. Unknown keys are refused wherever they
come from, and every error names the field in the three spellings that a user may have written.
"""

from __future__ import annotations

import inspect
import ipaddress
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FilePath,
    Secret,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings.exceptions import SettingsError

from service.errors import ConfigError
from service.help import OptionWriter
from service.peers import split_urls
from service.urls import check_url, check_urls

S = TypeVar("S", bound="Settings")


def _split(value: Any) -> Any:
    return split_urls(value) if isinstance(value, str) else value


DEFAULT_CONNECTIONS = 4096
"""A thousand islands with two each, and as many who look on."""

Url = Annotated[str, AfterValidator(check_url)]
"""Base URL of one process."""
Urls = Annotated[str, AfterValidator(check_urls)]
"""The same, or several with commas: the processes that can give one service."""
CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Several words of one option: ``a,b``; a list in a settings file."""


class Settings(BaseSettings):
    """Settings of one command; frozen, and strict about what it does not know."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        cli_use_class_docs_for_groups=True,
    )
    service: ClassVar[str] = "service"
    """The command's name: ``wadiloco <service>`` and ``WADILOCO_<SERVICE>_…``."""

    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    """debug, info, warning or error."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Constructed in code, a model takes its arguments alone; `load_settings` binds the other sources."""
        return (init_settings,)


class PeerSettings(Settings):
    """What a process of the fleet shows to the others, and what it trusts: an optional token, optional TLS."""

    token: SecretStr | None = None
    """Bearer token that control endpoints require, and that this process sends to its peers."""
    tls_cert: FilePath | None = None
    """Certificate (PEM) that peers are shown, and that a service serves HTTPS with; needs --tls-key."""
    tls_key: FilePath | None = None
    """Private key (PEM) of --tls-cert."""
    tls_ca: FilePath | None = None
    """CA (PEM) that peers' certificates must chain to. A service with --tls-cert asks its clients for one too (mutual
    TLS)."""

    @model_validator(mode="after")
    def _check_token_and_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if self.token is not None and not self.token.get_secret_value().strip():
            raise ValueError("token is empty: give a secret, or leave it out on loopback")
        if self.token is not None and not re.fullmatch(r"[\x20-\x7e]+", self.token.get_secret_value()):
            raise ValueError("token has signs that no HTTP header can carry: give one of printable ASCII")
        return self


class ServiceSettings(PeerSettings):
    """What every service has: an address to listen on, and what `PeerSettings` has."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback a token is required."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port to listen on; 0 takes a free one and logs it."""
    max_connections: int | None = Field(default=None, ge=8, le=1_000_000)
    """Connections that are open at a time; a request on one more is told to come back. By default 4096, at the
    controller 12288 and 4 for each slot."""

    @property
    def connection_limit(self) -> int:
        """``max_connections``, or what it is by default."""
        return self.max_connections or self.default_connections

    @property
    def default_connections(self) -> int:
        return DEFAULT_CONNECTIONS

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if self.token is None and not is_loopback(self.host):
            raise ValueError(f"host {self.host} is beyond loopback and token is not set: set token, or host 127.0.0.1")
        return self


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only (a name counts only if it is ``localhost``)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_settings(model: type[S], argv: Sequence[str]) -> S:
    """Settings of one service from its command line, environment and file.

    ``--config FILE`` names the TOML file; ``--print-config`` prints the result (secrets masked) and exits.

    Raises:
        ConfigError: a value that cannot work or a key that does not exist; the message names it.
    """
    arguments, config_file, print_config = _split_meta_arguments(argv)
    prefix = f"WADILOCO_{model.service.upper()}_"
    _refuse_unknown_environment(model, prefix)
    bound = _bind_sources(model, arguments, config_file, prefix)
    try:
        settings = bound()
    except ValidationError as exc:
        raise _explain(exc, model, prefix, config_file) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{config_file} is not valid TOML: {exc}", field="--config") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {config_file}: {exc.strerror or exc}", field="--config") from exc
    except SettingsError as exc:
        raise _explain_form(exc, model, prefix) from exc
    if print_config:
        sys.stdout.write(settings.model_dump_json(indent=2) + "\n")
        raise SystemExit(0)
    return settings


def _split_meta_arguments(argv: Sequence[str]) -> tuple[list[str], Path | None, bool]:
    rest: list[str] = []
    config_file: str | None = None
    print_config = False
    pending = iter(argv)
    for argument in pending:
        if argument == "--print-config":
            print_config = True
        elif argument == "--config":
            config_file = next(pending, None)
            if config_file is None:
                raise ConfigError("needs a file name", field="--config")
        elif argument.startswith("--config="):
            config_file = argument.removeprefix("--config=")
        elif argument == "--json":
            rest.append("--as-json")  # the field cannot be named json: that is a method of every model
        else:
            rest.append(argument)
    path = Path(config_file) if config_file is not None else None
    try:
        if path is not None and not path.is_file():
            raise ConfigError(f"{path} is not a file", field="--config")
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror or exc}", field="--config") from exc
    return rest, path, print_config


def _refuse_unknown_environment(model: type[Settings], prefix: str) -> None:
    known = {f"{prefix}{name.upper()}" for name in model.model_fields}
    unknown = sorted(name for name in os.environ if name.upper().startswith(prefix) and name.upper() not in known)
    if unknown:
        raise ConfigError("no such setting", field=unknown[0], remedy=f"see wadiloco {model.service} --help")


def _bind_sources(model: type[S], arguments: list[str], config_file: Path | None, prefix: str) -> type[S]:
    """A subclass of the model whose sources are this command line, this file and this environment."""

    class Bound(model):  # type: ignore[valid-type, misc]
        model_config = SettingsConfigDict(
            env_prefix=prefix, cli_prog_name=f"wadiloco {model.service}", toml_file=config_file, title=model.__name__
        )

        # Here and not in `Settings`: around the validators of every model between the two.
        @field_validator("*", mode="wrap")
        @classmethod
        def _name_field_of_os_error(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
            """A path that the system refuses to look at (too long a name, a broken disk) is the fault of its field."""
            try:
                return validate(value)
            except OSError as exc:
                raise ValueError(f"cannot be used as a file: {exc.strerror or exc}") from exc

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            command_line: CliSettingsSource[Any] = CliSettingsSource(
                settings_cls, cli_parse_args=arguments, add_argument_method=OptionWriter(model.model_fields)
            )
            return command_line, env_settings, TomlConfigSettingsSource(settings_cls)

    Bound.__doc__ = inspect.cleandoc(model.__doc__ or "")
    Bound.__name__ = Bound.__qualname__ = model.__name__
    return Bound


UNREADABLE = re.compile(r"Parsing error encountered for (\w+):|error parsing value for field \"(\w+)\"")


def _explain_form(exc: SettingsError, model: type[Settings], prefix: str) -> ConfigError:
    """A command line that is none, or an option whose value has not the form that it needs."""
    text = f"{exc} {exc.__cause__}"
    found = UNREADABLE.search(text)
    if found is None:
        return ConfigError(str(exc).removeprefix("error parsing CLI: "), remedy=f"see wadiloco {model.service} --help")
    name = found[1] or found[2]
    option, variable = f"--{name.replace('_', '-')}", f"{prefix}{name.upper()}"
    return ConfigError(
        "is not NAME=VALUE,...",
        field=name,
        remedy=f"write {option} NAME=VALUE, or {variable}='{{\"NAME\": VALUE}}'",
    )


def _explain(exc: ValidationError, model: type[Settings], prefix: str, config_file: Path | None) -> ConfigError:
    first = exc.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    message = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {exc.error_count() - 1} more)" if exc.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        where = f" in {config_file}" if config_file else ""
        remedy = f"see wadiloco {model.service} --help; a file spells its options with _ for -"
        return ConfigError(f"no such setting{where}{more}", field=name, remedy=remedy)
    if not name:
        return ConfigError(message + more)
    if len(first["loc"]) > 1 and isinstance(_default(model, name), dict):
        name = f"{name}.{first['loc'][1]}"
        more = ""  # of a value that may be of several types, each has its own
    given = first.get("input")
    is_hidden = (
        first["type"] == "missing" or isinstance(given, dict) or _is_secret(model, name) or _holds_password(given)
    )
    shown = "" if is_hidden else f", got {given!r}"
    option = str(first["loc"][0])
    return ConfigError(
        message + shown + more, field=name, remedy=f"set --{option.replace('_', '-')} or {prefix}{option.upper()}"
    )


def _default(model: type[Settings], name: str) -> object:
    field = model.model_fields.get(name)
    return field.get_default(call_default_factory=True, validated_data={}) if field is not None else None


def _holds_password(given: object) -> bool:
    """Whether it is, or was meant as, a URL with a user's password."""
    return re.search(r"://[^/]*:[^/]*@", str(given)) is not None


def _is_secret(model: type[Settings], name: str) -> bool:
    field = model.model_fields.get(name)
    kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()
    return any(isinstance(kind, type) and issubclass(kind, Secret | SecretStr) for kind in kinds)
