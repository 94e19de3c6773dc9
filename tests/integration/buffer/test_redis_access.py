"""Who may do what, and who can listen: users with an ACL, passwords, TLS."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from async_grpo.config import RunConfig
from async_grpo.config.buffer import RedisConfig
from async_grpo.errors import ConfigError, ServerLost, ServerRefused
from buffer import make_client, open_run
from tests.support.buffer_cases import admit, finish
from tests.support.redis_life import attach, begin, live_through
from tests.support.redis_proxies import Authority, Proxy
from tests.support.redis_topologies import Cluster, Sentinels, Server, running

RIGHTS_OF_A_RUN = ("resetchannels", "-@all", "+@read", "+@write", "-@dangerous", "+multi", "+exec", "+evalsha")
MORE_RIGHTS = ("+script|load", "+time", "+info", "+wait")
PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    with running(server):
        yield server


@pytest.fixture
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_GRPO_REDIS_PASSWORD", PASSWORD)


def permit(server: Server, run: str, *more: str) -> str:
    """A user with the rights that docs/buffer-redis.md gives to a run, and no others; returns its name."""
    user = f"user-{run[:8]}"
    keys = f"~agrpo:{{{run}}}:*"
    server.admin.execute_command(
        "ACL", "SETUSER", user, "reset", "on", f">{PASSWORD}", keys, *RIGHTS_OF_A_RUN, *MORE_RIGHTS, *more
    )
    return user


async def test_a_user_with_the_documented_rights_can_do_everything(server: Server, run: str, password: None) -> None:
    config = RedisConfig(url=f"redis://{permit(server, run)}@127.0.0.1:{server.port}", timeout_s=2.0)
    await live_through(config, run)


async def test_the_keys_of_another_run_are_refused_by_name(server: Server, run: str, password: None) -> None:
    config = RedisConfig(url=f"redis://{permit(server, run)}@127.0.0.1:{server.port}", timeout_s=2.0)
    with pytest.raises(ServerRefused, match=r"ACL.*~agrpo:\{RUN\}:\*"):
        await attach(config, "somebody-elses")
    assert not list(server.admin.scan_iter(match="*somebody-elses*"))


async def test_a_user_that_sees_its_own_run_alone_shares_a_server_with_others(
    server: Server, run: str, password: None
) -> None:
    server.admin.hset("agrpo:{other}:meta", "reserved_bytes", 1 << 60)
    redis = {"url": f"redis://{permit(server, run)}@127.0.0.1:{server.port}"}
    await (await open_run(RunConfig.model_validate({"name": run, "model": {"path": "model"}, "redis": redis}))).aclose()


async def test_a_right_that_is_taken_from_a_live_run_is_named(server: Server, run: str, password: None) -> None:
    user = permit(server, run)
    buffer = await begin(RedisConfig(url=f"redis://{user}@127.0.0.1:{server.port}", timeout_s=2.0), run)
    await admit(buffer, 4)
    server.admin.execute_command("ACL", "SETUSER", user, "-blpop")
    with pytest.raises(ServerRefused, match="blpop"):
        await admit(buffer, 1)
    server.admin.execute_command("ACL", "SETUSER", user, "-evalsha")
    with pytest.raises(ServerRefused, match="evalsha"):
        await buffer.end_run()
    await buffer.aclose()


async def test_the_user_may_come_from_the_environment(
    server: Server, run: str, password: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNC_GRPO_REDIS_USERNAME", permit(server, run))
    await live_through(RedisConfig(url=server.url, timeout_s=2.0), run)


async def test_a_wrong_user_is_refused_and_the_password_not_shown(server: Server, run: str, password: None) -> None:
    with pytest.raises(ServerRefused, match=r"ASYNC_GRPO_REDIS_PASSWORD.*ASYNC_GRPO_REDIS_USERNAME") as refusal:
        await attach(RedisConfig(url=f"redis://nobody@127.0.0.1:{server.port}", timeout_s=2.0), run)
    assert PASSWORD not in str(refusal.value)


async def test_a_cluster_takes_the_same_user_on_every_node(tmp_path: Path, password: None) -> None:
    with Cluster(tmp_path).running() as cluster:
        run = cluster.run_on(1)
        users = {permit(node, run, "+cluster|slots") for node in cluster.primaries}
        url = cluster.url(cluster.primaries[0]).replace("//", f"//{users.pop()}@")
        await live_through(RedisConfig(url=url, timeout_s=5.0), run)


async def test_sentinels_have_a_password_of_their_own(
    tmp_path: Path, run: str, password: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sentinels(tmp_path, password="watchmen").running() as sentinels:
        user = permit(sentinels.primary, run)
        config = RedisConfig(url=sentinels.url.replace("//", f"//{user}@"), timeout_s=5.0)
        with pytest.raises(ServerRefused, match="ASYNC_GRPO_SENTINEL_PASSWORD"):
            await attach(config, run)
        monkeypatch.setenv("ASYNC_GRPO_SENTINEL_PASSWORD", "watchmen")
        await live_through(config, run)


@asynccontextmanager
async def encrypted(server: Server, certificate: tuple[str, str], client_ca: str | None = None) -> AsyncIterator[int]:
    """The port of a proxy that speaks TLS; with client_ca it asks for certificates."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(*certificate)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    async with Proxy(server.port, context).running() as proxy:
        yield proxy.port


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> tuple[str, str]:
    return authority.sign("server", "IP:127.0.0.1")


async def test_an_encrypted_run_lives_on_the_right_certificate(
    server: Server, run: str, authority: Authority, certificate: tuple[str, str]
) -> None:
    async with encrypted(server, certificate) as port:
        await live_through(RedisConfig(url=f"rediss://127.0.0.1:{port}", tls_ca=authority.ca, timeout_s=5.0), run)


async def test_a_certificate_of_somebody_else_is_refused_at_once(
    server: Server, run: str, certificate: tuple[str, str], tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "theirs")
    async with encrypted(server, certificate) as port:
        for ca in (stranger.ca, None):
            with pytest.raises(ServerRefused, match=r"redis\.tls_ca"):
                await attach(RedisConfig(url=f"rediss://127.0.0.1:{port}", tls_ca=ca, timeout_s=60.0), run)


async def test_a_certificate_for_another_host_is_refused(server: Server, run: str, authority: Authority) -> None:
    async with encrypted(server, authority.sign("other", "DNS:elsewhere.example")) as port:
        with pytest.raises(ServerRefused, match="not valid for"):
            await attach(RedisConfig(url=f"rediss://127.0.0.1:{port}", tls_ca=authority.ca, timeout_s=60.0), run)


async def test_a_server_may_ask_for_a_certificate_of_the_client(
    server: Server, run: str, authority: Authority, certificate: tuple[str, str]
) -> None:
    mine, key = authority.sign("client", "DNS:client.example")
    async with encrypted(server, certificate, client_ca=authority.ca) as port:
        url = f"rediss://127.0.0.1:{port}"
        # Some servers say why they hang up, others only do.
        with pytest.raises((ServerRefused, ServerLost), match=r"redis\.tls_cert"):
            await attach(RedisConfig(url=url, tls_ca=authority.ca, timeout_s=1.0), run)
        await live_through(RedisConfig(url=url, tls_ca=authority.ca, tls_cert=mine, tls_key=key, timeout_s=5.0), run)


async def test_encryption_where_the_server_has_none_is_named(server: Server, run: str) -> None:
    with pytest.raises(ServerLost, match="rediss://"):
        await attach(RedisConfig(url=f"rediss://127.0.0.1:{server.port}", timeout_s=1.0), run)


async def test_no_encryption_where_the_server_wants_it_is_named(
    server: Server, run: str, certificate: tuple[str, str]
) -> None:
    async with encrypted(server, certificate) as port:
        with pytest.raises(ServerLost, match="rediss://"):
            await attach(RedisConfig(url=f"redis://127.0.0.1:{port}", timeout_s=1.0), run)


async def test_files_that_are_no_certificates_are_named(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"redis\.tls_ca is .*empty"):
        make_client(RedisConfig(url="rediss://host", tls_ca=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match=r"redis\.tls_cert \(.*gone\)"):
        make_client(RedisConfig(url="rediss://host", tls_ca=authority.ca, tls_cert=str(tmp_path / "gone")))


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"url": "redis://host", "tls_ca": "ca.crt"}, "rediss://"),
        ({"url": "rediss://host", "tls_key": "my.key"}, "tls_cert"),
        ({"replicas_to_wait_for": 1}, "embedded server"),
        ({"url": "redis+sentinel://user:secret@host,other/main"}, "ASYNC_GRPO_REDIS_PASSWORD"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(values: dict[str, object], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        RedisConfig.model_validate(values)


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        (None, "redis.url"),
        ("http://somewhere", "rediss://"),
        ("redis://", "HOST:PORT"),
        ("redis://host:port", "HOST:PORT"),
        ("redis://one,two", "redis+cluster://"),
        ("redis://host/zero", "number"),
        ("redis://host?socket_timeout=3", "socket_timeout"),
        ("unix://", "path of a socket"),
        ("redis+sentinel://host", "SERVICE"),
    ],
)
def test_a_url_that_is_wrong_says_what_is_right(url: str | None, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix.replace("+", r"\+")):
        make_client(RedisConfig(url=url))


def test_every_form_of_a_url_is_understood() -> None:
    clients = {
        url: make_client(RedisConfig(url=url))
        for url in (
            "redis://host",
            "redis://user@host:7/3",
            "unix:///tmp/a%20b.sock?db=2",
            "rediss://[::1]:6380",
            "redis+cluster://one,two:7001",
            "rediss+sentinel://one,two:7001/main?db=1",
        )
    }
    assert [str(client.address) for client in clients.values()] == [
        "host:6379",
        "host:7",
        "/tmp/a b.sock",
        "[::1]:6380",
        "the cluster of one:6379, two:7001",
        "main of the sentinels one:26379, two:7001",
    ]
    assert [client.address.db for client in clients.values()] == [0, 3, 2, 0, 0, 1]
    assert clients["redis://user@host:7/3"].connection_pool.connection_kwargs["username"] == "user"


async def test_a_change_is_refused_to_a_user_who_may_only_read(server: Server, run: str, password: None) -> None:
    buffer = await begin(RedisConfig(url=f"redis://{permit(server, run)}@127.0.0.1:{server.port}"), run)
    tickets = await admit(buffer, 1)
    server.admin.execute_command("ACL", "SETUSER", f"user-{run[:8]}", "-set")
    with pytest.raises(ServerRefused, match="set"):
        await finish(buffer, *tickets)
    stats = await buffer.stats()
    assert (stats.inflight, stats.ready) == (1, 0)
    await buffer.aclose()
