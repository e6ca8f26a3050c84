"""Options of nodes of which one kind computes prompts and another kind the text after them. The names are
SGLang's; vLLM's `--kv-transfer-config` says the same."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import msgspec

from mtpserve.config.options import check, option
from mtpserve.core.errors import ConfigError

HOST_GIB = 1.0  # host memory for pages, unless --kv-offload-gib says otherwise
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}  # vLLM's
CONNECTOR = "NixlConnector"
# vLLM's other fields: they say something about its own buffers, or the same as an option of ours.
IGNORED = (
    "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_connector_extra_config", "kv_load_failure_policy",
    "kv_parallel_size", "kv_rank",
    "enable_permute_local_kv",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    disaggregation_mode: str = option(
        "null",
        "role of this node. prefill: compute prompts and keep their KV pages for decode nodes; "
        "decode: load pages from prefill nodes; null, none: one node does both",
        choices=("null", "none", "prefill", "decode"),
    )
    disaggregation_bootstrap_port: int = option(
        8998, "port on which a prefill node serves KV pages; engine i uses this port + i; 0: a free port"
    )
    disaggregation_host: str = option(
        "127.0.0.1", "address on which a prefill node serves KV pages; responses name it to decode nodes"
    )
    disaggregation_peers: tuple[str, ...] = option(
        ("127.0.0.1", "localhost", "::1"),
        "hosts from which a decode node loads KV pages, as requests name them; *: any host",
    )
    disaggregation_transfer_backend: str = option(
        "auto",
        "how KV pages are transferred. shm: shared memory, on one machine; tcp; nixl (pip install "
        "nixl-cu12): NIXL, and tcp to nodes without it; auto: shm where possible, else tcp",
        choices=("auto", "shm", "tcp", "nixl"),
    )
    disaggregation_lease: float = option(
        60.0, "seconds for which a prefill node keeps a prompt's KV pages for a decode node"
    )
    disaggregation_timeout: float = option(
        120.0,
        "seconds for which a decode node waits for a prompt's KV pages; then it computes the prompt itself",
    )
    kv_transfer_config: str | None = option(
        None,
        'vLLM\'s form of these options: JSON, like {"kv_connector": "NixlConnector", "kv_role": '
        '"kv_both"}. kv_both: the node has both roles',
    )

    def __post_init__(self) -> None:
        port, host = self.disaggregation_bootstrap_port, self.disaggregation_host
        check(0 <= port < 65536, "disaggregation_bootstrap_port", port, "in [0, 65535]")
        check(
            not _is_any(host),
            "disaggregation_host",
            host,
            "one address that decode nodes can reach, not all interfaces",
        )
        for name in ("disaggregation_lease", "disaggregation_timeout"):
            check(0 < getattr(self, name) <= 3600, name, getattr(self, name), "in (0, 3600]")
        is_enabled = self.disaggregation_mode not in ("null", "none")
        check(
            not (is_enabled and self.kv_transfer_config),
            "kv_transfer_config",
            self.kv_transfer_config,
            "left out with --disaggregation-mode",
        )
        _ = self.transfer

    @property
    def transfer(self) -> dict[str, Any]:
        """vLLM's options. Raises ConfigError for what they must not be."""
        text = self.kv_transfer_config
        if text is None:
            return {}
        try:
            values = msgspec.json.decode(text)
        except msgspec.DecodeError:
            values = None
        check(isinstance(values, dict), "kv_transfer_config", text, "a JSON object")
        connector, role = values.get("kv_connector"), values.get("kv_role")
        if connector != CONNECTOR:
            raise ConfigError(
                f"--kv-transfer-config: kv_connector must be {CONNECTOR}, got {connector!r}; or use "
                f"--disaggregation-mode"
            )
        if role not in ROLES:
            raise ConfigError(f"--kv-transfer-config: kv_role must be {', '.join(ROLES)}, got {role!r}")
        if not isinstance(values.get("kv_ip", ""), str) or _is_any(values.get("kv_ip", "")):
            raise ConfigError(
                "--kv-transfer-config: kv_ip must be one address that decode nodes can reach, got "
                f"{values['kv_ip']!r}"
            )
        port = values.get("kv_port", 0)
        if type(port) is not int or not 0 <= port < 65536:
            raise ConfigError(f"--kv-transfer-config: kv_port must be in [0, 65535], got {port!r}")
        for name in values:
            if name not in ("kv_connector", "kv_role", "kv_ip", "kv_port", *IGNORED):
                raise ConfigError(
                    f"unknown key {name!r} in --kv-transfer-config; accepted: kv_connector, "
                    f"kv_role, kv_ip, kv_port"
                )
        return dict(values)

    @property
    def role(self) -> str | None:
        """prefill, decode, both or None."""
        if self.kv_transfer_config is not None:
            return ROLES[self.transfer["kv_role"]]
        return None if self.disaggregation_mode in ("null", "none") else self.disaggregation_mode

    @property
    def keeps(self) -> bool:
        """Pages for other nodes."""
        return self.role in ("prefill", "both")

    @property
    def pulls(self) -> bool:
        """Pages from other nodes."""
        return self.role in ("decode", "both")

    @property
    def host(self) -> str:
        return str(self.transfer.get("kv_ip", self.disaggregation_host))

    def port(self, engine: int) -> int:
        """Returns the port of one of several engines. Raises ConfigError."""
        port = int(self.transfer.get("kv_port", self.disaggregation_bootstrap_port))
        check(
            port + engine < 65536,
            "disaggregation_bootstrap_port",
            port,
            "a port such that the following ports, one per engine, are below 65536",
        )
        return port and port + engine

    def trusts(self, host: str) -> bool:
        return "*" in self.disaggregation_peers or host in self.disaggregation_peers


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"
