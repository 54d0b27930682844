//! Memory per cached image, in a process that does nothing else.

use futures::{StreamExt, stream};
use testimg::FakeRegistry;
use tokio::io::{AsyncBufReadExt, BufReader};

use archaware::image::credentials::Keyring;

use crate::resolving::{resolve, resolver, settings};

use super::report;

const IMAGES: usize = 20_000;
/// Images resolved before the first measurement, so that everything else is allocated.
const WARM_UP: usize = 500;

pub(crate) async fn cache() {
    let registry = FakeRegistry::start().await.unwrap();
    for number in 0..WARM_UP + IMAGES {
        registry.add(
            &format!("team-{}/application-{number}", number % 50),
            &testimg::numbered(number),
        );
    }
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["child", &registry.address()])
        .stdout(std::process::Stdio::piped())
        .stdin(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .await
        .unwrap();
    drop(child.stdin.take());
    child.wait().await.unwrap();
    report(
        "resident bytes for each of 20,000 images in the cache",
        line.trim(),
        "-",
        "<= 400",
    );
}

/// The measured process.
pub(crate) async fn child(address: &str) {
    let mut settings = settings();
    settings.images = WARM_UP + IMAGES;
    let resolver = resolver(settings);
    let look_up = async |numbers: std::ops::Range<usize>| {
        let one = |number: usize| {
            let image = format!("{address}/team-{}/application-{number}", number % 50);
            let resolver = &resolver;
            async move {
                let resolved = resolve(resolver, &image, &Keyring::default()).await;
                drop(resolved.unwrap());
            }
        };
        stream::iter(numbers)
            .map(one)
            .buffer_unordered(8)
            .collect::<Vec<()>>()
            .await;
    };
    look_up(0..WARM_UP).await;
    let before = resident();
    look_up(WARM_UP..WARM_UP + IMAGES).await;
    let each = (resident() - before) as f64 / IMAGES as f64;
    println!("{each:.0}");
}

/// Resident bytes of this process.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
