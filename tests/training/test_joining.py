"""How processes find each other, and that each knows why it cannot."""

import concurrent.futures
import contextlib
import itertools
import socket
import time

import pytest

import runs
import train
from fastweights import config as config_lib
from fastweights.errors import UserError
from fastweights.training import joining

TINY = str(runs.ROOT / "tests/tiny.py")


def roll(callers: list[tuple[int, int]], count: int, seconds: float = 20.0) -> list[str]:
    """What process 0 of `count`, and callers of (number, count) in that order, come to."""
    port, deadline = runs.free_port(), time.monotonic() + seconds

    def end(call, *args) -> str:
        try:
            call(*args, deadline)
        except UserError as error:
            return str(error)
        return "joined"

    with concurrent.futures.ThreadPoolExecutor() as pool:
        ends = [pool.submit(end, joining._call_the_roll, port, count)]
        for number, total in callers:
            time.sleep(0.2)
            args = ("127.0.0.1", port, total, number)
            ends.append(pool.submit(end, joining._answer_the_roll, *args))
        found = [one.result() for one in ends]
    # JAX's own service wants the port next, without SO_REUSEADDR perhaps.
    with contextlib.closing(socket.socket()) as after:
        after.bind(("", port))
    return found


def test_all_go_on_once_all_have_come():
    assert roll([(2, 3), (1, 3)], 3) == ["joined"] * 3
    assert roll([], 1) == ["joined"]


@pytest.mark.parametrize(
    ("callers", "told"),
    [
        ([(2, 4)], "process 1, 3 of 4 did not come in time; start all of them, or raise"),
        ([(1, 4), (1, 4)], "two processes have --process_id 1; give each its own"),
        ([(1, 3)], "process 1 has --num_processes 3 and process 0 4; give all the same"),
    ],
)
def test_a_mistake_is_told_to_all_who_came(callers, told):
    seconds = 2.0 if "time" in told else 20.0
    ends = roll(callers, 4, seconds)
    assert all(end.startswith(f"--multihost: {told}") for end in ends), ends


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_stranger_at_the_port_and_a_caller_that_comes_again_are_no_mistake(host):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port, deadline = runs.free_port(), time.monotonic() + 20
    with concurrent.futures.ThreadPoolExecutor() as pool:
        zero = pool.submit(joining._call_the_roll, port, 3, deadline)
        for said in (b"GET / HTTP/1.1\n", b"\xff\xfe\n", b"fastweights one\n", b""):
            with until_open(port) as call:
                call.sendall(said)
        with until_open(port) as call:
            call.sendall(b"fastweights 1 3\n")
            time.sleep(0.2)
        # It was started again, and nobody has called in between.
        others = [
            pool.submit(joining._answer_the_roll, host, port, 3, number, deadline)
            for number in (1, 2)
        ]
        assert [one.result() for one in (zero, *others)] == [None] * 3


@pytest.mark.parametrize("said", [b"\x00\x00\x12\x04\xff\n", b"HTTP/1.1 400 Bad Request\n", b""])
def test_what_else_answers_at_the_port_is_not_believed(said):
    """JAX's service of an earlier start, say, until it is gone."""
    port, deadline = runs.free_port(), time.monotonic() + 20
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with socket.create_server(("127.0.0.1", port)) as stranger:
            one = pool.submit(joining._answer_the_roll, "127.0.0.1", port, 2, 1, deadline)
            with stranger.accept()[0] as call:
                call.recv(64)
                call.sendall(said)
        zero = pool.submit(joining._call_the_roll, port, 2, deadline)
        assert one.result() is zero.result() is None


def until_open(port: int) -> socket.socket:
    for attempt in itertools.count():
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert attempt < 50
            time.sleep(0.1)
    raise AssertionError


def test_a_taken_port_is_told():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen at port {port} .*in use"):
            joining.initialize(f"127.0.0.1:{port}", 2, 0, 2)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("10.0.0.1", 1, 0, 2), r"--coordinator is '10\.0\.0\.1'; write it as host:port"),
        (("10.0.0.1:²", 1, 0, 2), r"--coordinator is '10\.0\.0\.1:²'; write it"),
        (("10.0.0.1:99999", 1, 0, 2), "--coordinator is .*99999'; write it"),
        (("10.0.0.1:1", 2, 2, 2), "--process_id is 2 of --num_processes 2; number"),
        (("10.0.0.1:1", 2, -1, 2), "--process_id is -1 of"),
        (("10.0.0.1:1", 2, 1, 0), "--init_timeout is 0; give at least 1"),
        ((None, None, None, 2, 0), "--silence is 0; give at least 1"),
    ],
)
def test_numbers_that_cannot_be_are_told_before_anyone_waits(args, told):
    with pytest.raises(UserError, match=told):
        joining.initialize(*args)


def test_a_coordinator_that_never_answers_is_named():
    with pytest.raises(UserError, match=r"no coordinator answers at 127\.0\.0\.1:\d+ \(Conn"):
        joining.initialize(f"127.0.0.1:{runs.free_port()}", 2, 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=f"no coordinator answers at {address} .timed out"):
            joining.initialize(address, 2, 1, 1)


def test_without_a_cluster_the_options_are_named(monkeypatch):
    def no_cluster(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(joining.jax.distributed, "initialize", no_cluster)
    with pytest.raises(UserError, match=r"did not find a cluster's other .* or give --coordinator"):
        joining.initialize(None, None, None, 1)


def test_a_process_without_a_device_says_so(monkeypatch):
    """As JAX has it when a node runs more processes than it has GPUs."""

    def none_left():
        raise RuntimeError("no visible GPU")

    monkeypatch.setattr(joining, "_call_the_roll", lambda *_: None)
    monkeypatch.setattr(joining.jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(joining.jax, "local_device_count", none_left)
    with pytest.raises(UserError, match=r"process 0 of 2 has no device .*no visible GPU.*no more"):
        joining.initialize("127.0.0.1:1", 2, 0, 1)


def test_a_process_that_waits_in_vain_for_the_others_says_for_whom(tmp_path):
    command = runs.train_command(tmp_path / "run")
    code, output = runs.run(
        *command, "--multihost", "--coordinator", f"127.0.0.1:{runs.free_port()}",
        "--num_processes", 2, "--process_id", 0, "--init_timeout", 2,
    )  # fmt: skip
    assert code == 2
    assert output.strip().split("\n")[-1].startswith("error: --multihost: process 1 of 2 did not")
    assert not (tmp_path / "run").exists()


def test_one_process_of_several_asks_for_multihost(tmp_path):
    command = runs.train_command(tmp_path / "run")[1:]
    with pytest.raises(UserError, match="go with --multihost; add it"):
        train.main([*command, "--num_processes", "2", "--process_id", "0"])


def test_processes_with_two_configs_end_before_they_train(tmp_path):
    """With two learning rates replicas part in silence; with two step counts they wait for ever."""
    address = f"127.0.0.1:{runs.free_port()}"
    command = runs.train_command(tmp_path / "run", "model.num_layers=1", "model.pattern=A")
    together = ["--multihost", "--coordinator", address, "--num_processes", 2]
    each = [
        runs.start(*command, f"--config.optim.lr={lr}", *together, "--process_id", index)
        for index, lr in enumerate((0.01, 0.02))
    ]
    for code, output in map(runs.finish, each):
        assert code == 2
        assert (
            "error: process 1 was started with optim.lr=0.02 and process 0 with 0.01; start all"
            in output
        )
    assert not (tmp_path / "run").exists()


def test_the_difference_of_two_configs_is_named(monkeypatch):
    configs = [config_lib.load(TINY, [f"steps={steps}"]) for steps in (8, 8, 100)]
    texts = [config_lib.to_json(config).encode() for config in configs]

    def gathered(mine):
        size = max(map(len, texts))
        if mine.ndim == 0:
            return joining.np.array([len(text) for text in texts])
        return joining.np.array([list(text.ljust(size, b"\0")) for text in texts], "uint8")

    monkeypatch.setattr(joining.jax, "process_count", lambda: 3)
    monkeypatch.setattr(joining.multihost_utils, "process_allgather", gathered)
    with pytest.raises(UserError, match="process 2 was started with steps=100 and process 0 with"):
        joining.agree(configs[0])
    texts[2] = texts[0]
    joining.agree(configs[0])
