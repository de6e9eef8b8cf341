"""Settings of every test: no deadline per example, because the machine may be busy; failures can be replayed."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    print_blob=True,
    # Contract suites are inherited by each implementation's class: their methods run on several classes.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile("default")
