//! Programs that know credentials: run with a question on stdin, answering on stdout.

use std::{
    io,
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::Command,
    sync::Semaphore,
};

/// As the kubelet does.
const TIMEOUT: Duration = Duration::from_mins(1);
/// Runs of one program at a time: each may be an interpreter with a cloud's whole SDK.
pub(super) const AT_ONCE: usize = 4;
const MAX_ANSWER: u64 = 1024 * 1024;

/// Why a program gave no answer. What it printed is not part of it: that may be a secret.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    #[error("it cannot be run")]
    Run(#[from] io::Error),
    #[error("it ended with {0}; run it by hand to see why")]
    Failed(ExitStatus, Vec<u8>),
    #[error("its answer is malformed")]
    Malformed,
    #[error("it did not end within {} s", TIMEOUT.as_secs())]
    TimedOut,
    #[error("its answer is larger than 1 MiB")]
    TooLarge,
}

/// How long a pod waits for a program. One that takes longer goes on, and its answer serves the next attempt.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `program` to its end; it is killed when it takes too long, or nobody waits for it any more.
pub(super) async fn run(
    program: &Path,
    arguments: &[String],
    environment: &[(String, String)],
    question: &[u8],
    slots: &Semaphore,
) -> Result<Vec<u8>, CommandError> {
    let running = async {
        let _slot = slots.acquire().await;
        let mut child = Command::new(program)
            .args(arguments)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // One that does not read its question may still answer it.
            let _ = stdin.write_all(question).await;
        }
        let mut answer = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            stdout.take(MAX_ANSWER + 1).read_to_end(&mut answer).await?;
        }
        if answer.len() as u64 > MAX_ANSWER {
            return Err(CommandError::TooLarge);
        }
        let status = child.wait().await?;
        if status.success() {
            Ok(answer)
        } else {
            Err(CommandError::Failed(status, answer))
        }
    };
    tokio::time::timeout(TIMEOUT, running)
        .await
        .unwrap_or(Err(CommandError::TimedOut))
}
