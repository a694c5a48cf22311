"""Alerts that people receive: webhooks, PagerDuty and e-mail, told from the journal by a process of their own.

`destinations` says where to (`[alerts.NAME]` in chronicle.toml), `messages` what is told of a run, `outbox` what a destination
has had, on disk, `sending` sends one message, `process` does all that beside a launch. Neither the training nor its
supervisor waits for any of it.
"""
