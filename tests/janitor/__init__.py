"""Who sweeps and when: tasks and schedules in this process, and real workers and beats on real brokers."""
