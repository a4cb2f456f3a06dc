public class Main {
  public static void main(String[] args) {
    System.exit(Integer.parseInt(args[0]));
  }
}
