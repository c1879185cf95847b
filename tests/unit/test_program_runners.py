"""Which runner a program has: the compiled one, or Python; the GIL, forks, and processes without a compiler."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvraw.errors import DriverError, UnsupportedDriverError
from kvraw.runtime import program as module
from kvraw.runtime.program import IDS, IDS_COUNT, Commands, Program, driver_functions, warm_up
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.driver_calls import Recorder


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    assert warm_up()


def test_the_fake_driver_runs_in_python(fake: FakeDriver) -> None:
    assert driver_functions(fake) is None
    fake.context_push(fake.primary_retain(0))
    stream, event, data = fake.stream_create(), fake.event_create(), fake.mem_alloc(64)
    host = fake.host_alloc(64)
    c = Commands()
    c.uncaptured(stream)
    c.memset(data, 7, 64, stream)
    c.copy(host, data, 64, stream)
    c.record(event, stream)
    program = Program(c, fake)
    assert not program.compiled
    assert program.run()
    fake.stream_synchronize(stream)
    c = Commands()
    c.reached(event)
    assert Program(c, fake).run()
    assert bytes((ctypes.c_uint8 * 64).from_address(host)) == b"\7" * 64
    fake.fail("event_record", 1, "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError) as met:
        program.run()
    assert met.value.command == 3


def test_a_missing_function_leaves_it_to_python() -> None:
    recorder, c = Recorder(), Commands()
    del recorder.addresses["cuMemcpyBatchAsync"]
    sizes = np.ones(1, np.uint64)
    c.copy_batch(*[int(sizes.ctypes.data)] * 3, 1, 7)
    program = Program(c, recorder.driver())
    assert not program.compiled
    with pytest.raises(UnsupportedDriverError, match=r"needs a CUDA 12\.8 driver, this one is 12040"):
        program.run()
    c = Commands()
    c.record(1, 2)
    assert Program(c, recorder.driver()).compiled


def test_a_value_of_other_commands_is_refused() -> None:
    c = Commands()
    with pytest.raises(ValueError, match="row 0 uses value 2, of 2"):
        c.record(Commands().value(3) + 1, 2)
    c = Commands()
    with pytest.raises(ValueError, match="width is 2"):
        c.write(0, 0, 0, width=2)


@pytest.mark.parametrize("release", [False, True])
def test_the_gil(release: bool) -> None:
    """A call of the driver that waits for another thread's Python ends only where the program gives the GIL away."""
    recorder, c = Recorder(), Commands()
    turned, met = threading.Event(), []
    blocking = ctypes.PyDLL(None).usleep  # keeps the GIL, if the caller has it
    recorder.addresses["cuEventQuery"] = int(ctypes.cast(blocking, ctypes.c_void_p).value or 0)
    c.reached(200_000)  # microseconds
    program = Program(c, recorder.driver(), release=release)
    assert program.release is release
    program.run()  # warm

    def other() -> None:
        turned.set()
        for _ in range(200):
            met.append(threading.get_native_id())
            time.sleep(0.0005)

    thread = threading.Thread(target=other)
    thread.start()
    turned.wait()
    before = len(met)
    program.run()
    during = len(met) - before
    thread.join()
    assert during > 20 if release else during <= 3


def test_programs_hold_what_they_use() -> None:
    recorder, c = Recorder(), Commands()
    c.check("ids", IDS, IDS_COUNT, 10_000, distinct=True)
    made = [Program(c, recorder.driver()) for _ in range(20)]
    del made[::2]
    gc.collect()
    junk = [np.full(40, 2**64 - 1, np.uint64) for _ in range(200)]
    assert all(program.run(np.arange(10_000)) for program in made)
    assert len(junk) == 200


def test_an_error_keeps_its_command_in_another_process() -> None:
    error = DriverError("CUDA_ERROR_INVALID_VALUE", 1, "cuMemcpyAsync")
    assert error.command is None
    error.command = 4
    again = pickle.loads(pickle.dumps(error))
    assert (again.command, again.call, str(again)) == (4, "cuMemcpyAsync", str(error))


def python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
from tests.helpers.driver_calls import Recorder
from kvraw.runtime.program import Commands, Program, warm_up
r, c = Recorder(), Commands()
c.record(1, 2)
p = Program(c, r.driver())
"""


def test_without_a_compiler() -> None:
    code = SCRIPT + "print(warm_up(), p.compiled, p.run(), r.calls)"
    for environ in ({"NUMBA_DISABLE_JIT": "1"}, {}):
        block = "" if environ else "import sys; sys.modules['numba'] = None\n"
        assert python(block + code, **environ) == "False False True [('cuEventRecord', 1, 2)]\n"


def test_compiles_in_the_background() -> None:
    code = SCRIPT + (
        "import sys, time\nassert p.run()\nend = time.time() + 60\n"
        "while not p.compiled and time.time() < end: time.sleep(0.01)\n"
        "print(p.compiled, p.run(), len(r.calls))"
    )
    assert python(code) == "True True 2\n"


def test_a_fork_and_an_exit_in_the_midst_of_compiling() -> None:
    code = SCRIPT + (
        "import os\npid = os.fork()\n"
        "if not pid:\n    os._exit(0 if p.run() and p.compiled else 1)\n"
        "print(os.waitpid(pid, 0)[1])"
    )
    assert python(code) == "0\n"
    assert python(SCRIPT + "print(p.run())") == "True\n"


def test_why_it_is_python_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "COMPILED", module.Compiled("programs are run", module._compile))
    monkeypatch.setitem(sys.modules, "kvraw.runtime.program_numba", None)
    with caplog.at_level(logging.INFO, "kvraw"):
        assert not warm_up()
    assert "programs are run by Python" in caplog.text
