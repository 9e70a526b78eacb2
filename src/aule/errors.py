"""Exceptions. Every error that a user can see is an :class:`AuleError` with a stable ``code``.

Messages read ``[op] expected ..., got ...; remedy``.
"""

from __future__ import annotations


class AuleError(Exception):
    """Base of all errors raised by aule.

    Parameters
    ----------
    code : str
        Stable identifier, for example ``"AULE_ERROR_INVALID_SHAPE"``.
    message : str
        What was expected, what was found and what to do about it.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"

    def __reduce__(self) -> tuple[object, ...]:
        # Subclasses have other constructor arguments than ``args``, so the default pickling would fail.
        return (_rebuild, (type(self), dict(self.__dict__), self.args))


def _rebuild(cls: type[AuleError], state: dict[str, object], args: tuple[object, ...]) -> AuleError:
    error = AuleError.__new__(cls)  # MemoryError has a constructor of its own, which refuses our classes
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class BackendUnavailableError(AuleError):
    """The requested backend is not available on this machine."""

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(f"AULE_ERROR_{backend.split(':')[0].upper()}_INIT", message)
        self.backend = backend


class NoComputeQueueError(BackendUnavailableError):
    """A device has no compute queue."""

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(backend, message)
        self.code = "AULE_ERROR_NO_COMPUTE_QUEUE"


class OutOfMemoryError(AuleError, MemoryError):
    """The device, or the host, refused an allocation; ``requested_bytes`` of it where that is known."""

    def __init__(self, message: str, requested_bytes: int | None = None) -> None:
        super().__init__("AULE_ERROR_OUT_OF_MEMORY", message)
        self.requested_bytes = requested_bytes


class CacheFullError(OutOfMemoryError):
    """A `KVCache` has fewer free pages than new tokens need; nothing was written.

    Attributes
    ----------
    pages_needed, pages_free : int
        Pages that the call needed, and pages that were free.
    """

    def __init__(self, message: str, pages_needed: int, pages_free: int, requested_bytes: int | None = None) -> None:
        super().__init__(message, requested_bytes)
        self.code = "AULE_ERROR_CACHE_FULL"
        self.pages_needed = pages_needed
        self.pages_free = pages_free


class InvalidShapeError(AuleError, ValueError):
    """Shapes, strides or options do not fit together."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_INVALID_SHAPE", message)


class InvalidArgumentError(AuleError, ValueError):
    """An option has a value outside its domain (a NaN scale, a negative window)."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_INVALID_ARGUMENT", message)


class UnknownOptionError(AuleError, TypeError):
    """A function was called with an option that it does not have."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_UNKNOWN_OPTION", message)


class InvalidDtypeError(AuleError, TypeError):
    """An element type is not supported, or types are mixed."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_INVALID_DTYPE", message)


class DeviceMismatchError(AuleError, ValueError):
    """Arrays of one call live on different devices."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_DEVICE_MISMATCH", message)


class ShaderCompileError(AuleError):
    """A driver refused a kernel.

    Attributes
    ----------
    log : str
        The driver's log.
    source_path : str or None
        Path of the saved source.
    """

    def __init__(self, message: str, log: str = "", source_path: str | None = None) -> None:
        super().__init__("AULE_ERROR_SHADER_COMPILE", message)
        self.log = log
        self.source_path = source_path


class DeviceLostError(AuleError):
    """The device stopped answering; its context is gone."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_DEVICE_LOST", message)


class LaunchError(AuleError):
    """A driver refused a launch, a copy or a synchronisation."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_LAUNCH", message)


class ClosedError(AuleError):
    """A device, context or tensor was used after it was closed."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_CLOSED", message)


class CommunicationError(AuleError, RuntimeError):
    """Ranks of a process group lost each other, or one did not answer within the group's time limit."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_COMMUNICATION", message)


class KernelError(AuleError):
    """A kernel breaks a rule of the IR, or uses something that its target language lacks."""

    def __init__(self, message: str) -> None:
        super().__init__("AULE_ERROR_KERNEL", message)
