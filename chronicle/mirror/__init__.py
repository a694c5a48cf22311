"""The journal projected into MLflow: parent run = run, nested run = launch, `abandoned_after` on what was given up.

Never resumes an MLflow run across a rollback, because MLflow's headline would stay with the abandoned launch
(`loss = 100.0`) and a changed LR parameter raises. MLflow is a projection: how far it has come stands in its own tags, so
it can be rebuilt, fed again, or be down.

    process      (`chronicle run`) starts the feeding process, which feeds every two seconds until its stdin ends
    projection   one pass: what is new in journal and per-step logs goes out in batches; the only importer of mlflow here
    wording      which parameters and tags MLflow is told; pure
"""
